// Enough of CUDA to build a rendered kernel with g++ and run it on the CPU, under ASan and UBSan.
//
// Kernels without barriers or warp exchanges run thread after thread. Where JITROPE_COLLECTIVES is
// true a block is as many std::threads as it has CUDA threads. A thread that has left the kernel no
// longer counts at a barrier, as on the device.
#pragma once
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __restrict__

struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct dim3 { unsigned int x = 1, y = 1, z = 1; };

inline thread_local dim3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

using std::max;
using std::min;

template <typename T> T __ldcs(const T* address) { return *address; }
template <typename T> void __stcs(T* address, T value) { *address = value; }
inline unsigned int __float_as_uint(float x) { unsigned int bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(unsigned int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline float __fmul_rn(float a, float b) { return a * b; }         // built with -ffp-contract=off
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float half_to_float(unsigned short bits) { return _cvtsh_ss(bits); }
inline unsigned short float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// ---- barriers and warp exchanges ---------------------------------------------------------------
struct Warp { std::unique_ptr<std::barrier<>> barrier; std::uint64_t slots[32] = {}; };
inline std::unique_ptr<std::barrier<>> block_barrier;
inline std::vector<Warp> warps;

inline unsigned int linear_thread() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline int __syncthreads_or(int predicate) {
    static std::atomic<int> any{0};
    if (predicate) any = 1;
    __syncthreads();
    const int result = any;
    __syncthreads();
    if (!linear_thread()) any = 0;
    __syncthreads();
    return result;
}
inline void __syncwarp(unsigned int = ~0u) { warps[linear_thread() / 32].barrier->arrive_and_wait(); }

// Every lane of the warp shows a value; the one of lane `from` comes back.
template <typename T>
T exchange(T value, unsigned int from) {
    Warp& warp = warps[linear_thread() / 32];
    std::memcpy(&warp.slots[linear_thread() % 32], &value, sizeof value);
    warp.barrier->arrive_and_wait();
    T result;
    std::memcpy(&result, &warp.slots[from % 32], sizeof result);
    warp.barrier->arrive_and_wait();
    return result;
}
template <typename T> T __shfl_sync(unsigned int, T value, int from) { return exchange(value, from); }
template <typename T> T __shfl_xor_sync(unsigned int, T value, int mask) {
    return exchange(value, linear_thread() % 32 ^ mask);
}
template <typename T> T __shfl_up_sync(unsigned int, T value, int by) {
    const unsigned int lane = linear_thread() % 32;
    return exchange(value, lane >= static_cast<unsigned int>(by) ? lane - by : lane);
}
template <typename T> T __shfl_down_sync(unsigned int, T value, int by) {
    const unsigned int lane = linear_thread() % 32;
    return exchange(value, lane + by < 32 ? lane + by : lane);
}
inline unsigned int __ballot_sync(unsigned int, bool predicate) {
    Warp& warp = warps[linear_thread() / 32];
    warp.slots[linear_thread() % 32] = predicate;
    warp.barrier->arrive_and_wait();
    unsigned int mask = 0;
    for (unsigned int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned int>(warp.slots[lane] & 1) << lane;
    warp.barrier->arrive_and_wait();
    return mask;
}
inline int __popc(unsigned int x) { return __builtin_popcount(x); }

// ---- launch ------------------------------------------------------------------------------------
template <bool together, typename Kernel>
void launch(dim3 grid, dim3 block, Kernel kernel) {
    gridDim = grid;
    blockDim = block;
    const unsigned int threads = block.x * block.y * block.z;
    for (unsigned int b = 0; b < grid.x * grid.y * grid.z; ++b) {
        const auto run = [&](unsigned int t) {
            blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
            threadIdx = {t % block.x, t / block.x % block.y, t / block.x / block.y};
            kernel();
        };
        if constexpr (!together) {
            for (unsigned int t = 0; t < threads; ++t) run(t);
            continue;
        }
        block_barrier = std::make_unique<std::barrier<>>(threads);
        warps = std::vector<Warp>((threads + 31) / 32);
        for (unsigned int w = 0; w < warps.size(); ++w)
            warps[w].barrier = std::make_unique<std::barrier<>>(std::min(32u, threads - 32 * w));
        std::vector<std::thread> pool;
        for (unsigned int t = 0; t < threads; ++t)
            pool.emplace_back([&run, t] {
                run(t);
                block_barrier->arrive_and_drop();
                warps[t / 32].barrier->arrive_and_drop();
            });
        for (std::thread& thread : pool) thread.join();
    }
}
