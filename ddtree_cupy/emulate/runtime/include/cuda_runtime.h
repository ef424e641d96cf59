// cuda_runtime.h: its contents come from ddtree_emulate.h, which is always included.
