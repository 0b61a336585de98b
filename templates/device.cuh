// The words of a function on the device, and programmatic dependent launch.
#define DEVICE __device__ __forceinline__

// From sm_90 on, a kernel that is launched this way may begin while the previous one in the stream is still running.
//
// It waits before its first access to memory, so it sees everything that earlier kernels wrote. It lets the
// next one begin only after that wait, so a kernel never overlaps the kernel before the previous one.
// After an ordinary launch, or on an older GPU, both functions do nothing.
DEVICE void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void let_the_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
