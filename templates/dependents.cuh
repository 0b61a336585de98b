// The words of a function on the device, and programmatic dependent launch.
#define DEVICE __device__ __forceinline__

// From sm_90 on, a kernel that is launched this way may begin while the one before it in the stream still runs. It
// sees all that earlier kernels stored, before or after their signal (PTX ISA, "griddepcontrol"):
// - `wait` ends when the grid before has completed and its memory operations are visible. It does not wait for the
//   signal, `launch_dependents`, which only says that the next grid may begin: the signal may stand before stores.
// - All threads of every kernel wait first. Until then they read only their parameters and tensor maps, which the
//   launch copied: no tensor, counter or scratch. No load is `ld.global.nc`,
//   which is for memory that nothing changes meanwhile.
// - Of grids A, B, C, C may begin when each block of B has signalled or ended, after B's wait: A has completed. C
//   waits for B. So C sees A and B, as does an ordinary launch behind B, and at most two grids run at a time.
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
