/* What the CUDA device knows of the kernels. */
#ifndef DT_CUDA_TABLE_H
#define DT_CUDA_TABLE_H
#ifdef __cplusplus
extern "C"
#endif
    const struct dt_kernel *
    k_cuda_kernels(void); /* [DT_NOPS]; run is NULL where an op has no kernel (views, communication) */
#endif
