// Programmatic dependent launch (sm_90 and later): a kernel that is launched so may begin while the one
// before it in the stream still runs.
//
// It waits before its first access to memory, so it sees all that was written before it, whoever wrote
// it; and lets the next one begin only behind that wait, so a kernel never runs beside one that is two
// before it. Launched the ordinary way, or on an older GPU, both do nothing.

__device__ __forceinline__ void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_the_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
