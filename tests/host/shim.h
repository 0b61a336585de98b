// Enough of CUDA to build a rendered kernel with g++ and run it on the CPU, under ASan and UBSan.
//
// Every kernel includes this file, so it is small; runtime.cpp, which launches kernels, is built once.
#pragma once
#include <cstdint>
#include <cstring>

extern "C" {  // as in <math.h>, which would take as long as the kernel's own text; so would <immintrin.h>
float sqrtf(float) noexcept;
float expf(float) noexcept;
float log1pf(float) noexcept;
float fabsf(float) noexcept;
float rintf(float) noexcept;
float fminf(float, float) noexcept;
float fmaxf(float, float) noexcept;
float fmaf(float, float, float) noexcept;
void sincosf(float, float*, float*) noexcept;
double fma(double, double, double) noexcept;
}

// Linked with runtime.cpp: one kernel.
struct Built { std::size_t parameters; void (*call)(const void* parameters); };
extern const Built built;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static
#define __restrict__

struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct dim3 { unsigned int x = 1, y = 1, z = 1; };

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

template <typename T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <typename T> constexpr T max(T a, T b) { return a < b ? b : a; }

template <typename T> T __ldcs(const T* address) { return *address; }
template <typename T> T __ldcg(const T* address) { return *address; }
inline unsigned int __float_as_uint(float x) { unsigned int bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(unsigned int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
// Built with -ffp-contract=off. A GPU's NaN is positive.
inline float __fmul_rn(float a, float b) {
    const float product = a * b;
    return product == product ? product : __uint_as_float(0x7fffffffu);
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

// As in <f16cintrin.h>.
using Halves = short __attribute__((vector_size(16)));
using Floats = float __attribute__((vector_size(16)));
inline float half_to_float(unsigned short bits) { return __builtin_ia32_vcvtph2ps(Halves{static_cast<short>(bits)})[0]; }
inline unsigned short float_to_half(float x) { return __builtin_ia32_vcvtps2ph(Floats{x}, 0)[0]; }

// ---- barriers and warp exchanges ---------------------------------------------------------------
inline unsigned int linear_thread() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
unsigned int atomicInc(unsigned int* address, unsigned int limit);
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __syncthreads();
inline unsigned int atomicMax(unsigned int* address, unsigned int value) {
    unsigned int old = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (old < value && !__atomic_compare_exchange_n(address, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
inline int atomicAdd(int* address, int value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }
int __syncthreads_or(int predicate);
void __syncwarp(unsigned int = ~0u);
unsigned int __ballot_sync(unsigned int, bool predicate);
std::uint64_t exchange(std::uint64_t bits, unsigned int from);      // every lane shows its bits; those of lane `from`

template <typename T> T __shfl_sync(unsigned int, T value, int from) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = exchange(bits, from);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <typename T> T __shfl_xor_sync(unsigned int mask, T value, int lanes) {
    return __shfl_sync(mask, value, linear_thread() % 32 ^ lanes);
}
template <typename T> T __shfl_up_sync(unsigned int mask, T value, int by) {
    const unsigned int lane = linear_thread() % 32;
    return __shfl_sync(mask, value, lane >= static_cast<unsigned int>(by) ? lane - by : lane);
}
template <typename T> T __shfl_down_sync(unsigned int mask, T value, int by) {
    const unsigned int lane = linear_thread() % 32;
    return __shfl_sync(mask, value, lane + by < 32 ? lane + by : lane);
}
inline int __popc(unsigned int x) { return __builtin_popcount(x); }
