// cuda_runtime_api.h: its contents come from ddtree_emulate.h, which is always included.
