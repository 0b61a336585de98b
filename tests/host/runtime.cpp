// Linked into every kernel: `run` launches it once.
//
// Kernels without barriers or warp exchanges run one thread after the other. If the threads of a block synchronise, each
// CUDA thread is a std::thread. A thread that has left the kernel no longer counts at a barrier, as on the device.
#include <atomic>
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#include "shim.h"

constinit thread_local dim3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// ---- barriers and warp exchanges ---------------------------------------------------------------
struct Warp { std::unique_ptr<std::barrier<>> barrier; std::uint64_t slots[32] = {}; };
static std::unique_ptr<std::barrier<>> block_barrier;
static std::vector<Warp> warps;

unsigned int atomicInc(unsigned int* address, unsigned int limit) {
    std::atomic_ref<unsigned int> counter(*address);
    unsigned int old = counter;
    while (!counter.compare_exchange_weak(old, old >= limit ? 0 : old + 1)) {}
    return old;
}
void __syncthreads() { block_barrier->arrive_and_wait(); }
int __syncthreads_or(int predicate) {
    static std::atomic<int> any{0};
    if (predicate) any = 1;
    __syncthreads();
    const int result = any;
    __syncthreads();
    if (!linear_thread()) any = 0;
    __syncthreads();
    return result;
}
void __syncwarp(unsigned int) { warps[linear_thread() / 32].barrier->arrive_and_wait(); }

std::uint64_t exchange(std::uint64_t bits, unsigned int from) {
    Warp& warp = warps[linear_thread() / 32];
    warp.slots[linear_thread() % 32] = bits;
    warp.barrier->arrive_and_wait();
    bits = warp.slots[from % 32];
    warp.barrier->arrive_and_wait();
    return bits;
}
unsigned int __ballot_sync(unsigned int, bool predicate) {
    Warp& warp = warps[linear_thread() / 32];
    warp.slots[linear_thread() % 32] = predicate;
    warp.barrier->arrive_and_wait();
    unsigned int mask = 0;
    for (unsigned int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned int>(warp.slots[lane] & 1) << lane;
    warp.barrier->arrive_and_wait();
    return mask;
}

// ---- a launch ----------------------------------------------------------------------------------
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED std::size_t parameter_bytes() { return built.parameters; }
EXPORTED void run(const void* parameters, unsigned gx, unsigned gy, unsigned block) {
    gridDim = {gx, gy, 1};
    blockDim = {block, 1, 1};
    const auto call = [=](unsigned int b, unsigned int t) {
        blockIdx = {b % gx, b / gx, 0};
        threadIdx = {t, 0, 0};
        built.call(parameters);
    };
    if (!built.meets) {
        for (unsigned int b = 0; b < gx * gy; ++b)
            for (unsigned int t = 0; t < block; ++t) call(b, t);
        return;
    }
    const auto begin_block = [=]() noexcept {
        block_barrier = std::make_unique<std::barrier<>>(block);
        warps = std::vector<Warp>((block + 31) / 32);
        for (unsigned int w = 0; w < warps.size(); ++w)
            warps[w].barrier = std::make_unique<std::barrier<>>(min(32u, block - 32 * w));
    };
    begin_block();
    std::barrier end_block(block, begin_block);
    std::vector<std::thread> pool;
    for (unsigned int t = 0; t < block; ++t)
        pool.emplace_back([&, t] {
            for (unsigned int b = 0; b < gx * gy; ++b) {
                call(b, t);
                block_barrier->arrive_and_drop();
                warps[t / 32].barrier->arrive_and_drop();
                end_block.arrive_and_wait();
            }
        });
    for (std::thread& each : pool) each.join();
}
