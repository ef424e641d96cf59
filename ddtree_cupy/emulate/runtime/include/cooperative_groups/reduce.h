// cooperative_groups/reduce.h: its contents come from cooperative_groups.h.
#pragma once
#include "../cooperative_groups.h"
