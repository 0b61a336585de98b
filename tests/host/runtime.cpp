// Linked into every kernel: `run` launches it once.
//
// The threads of a block take turns on one thread of the CPU, each with its own stack: one runs until it must wait at a
// barrier or has left the kernel, then the next. A thread that has left no longer counts at a barrier, as on the device.
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#include "shim.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

// ---- turns ---------------------------------------------------------------------------------------
struct Thread { ucontext_t context; bool left; };
static std::vector<Thread> threads;
static ucontext_t launcher;
static bool waiting;                // no barrier opened in this round of turns
static const void* given;           // the kernel's parameters

struct Barrier {
    unsigned int expected, arrived = 0, phase = 0;
    void open() {
        if (arrived == expected) arrived = 0, ++phase, waiting = false;
    }
    void wait() {
        const unsigned int before = phase;
        ++arrived;
        open();
        while (phase == before) swapcontext(&threads[threadIdx.x].context, &launcher);
    }
    void leave() { --expected, open(); }
};
struct Warp { Barrier barrier; std::uint64_t slots[32] = {}; };
static Barrier block_barrier;
static std::vector<Warp> warps;

static void run_thread() {
    built.call(given);
    threads[threadIdx.x].left = true;
    block_barrier.leave();
    warps[threadIdx.x / 32].barrier.leave();
}

// ---- barriers, warp exchanges, atomics -------------------------------------------------------------
unsigned int atomicInc(unsigned int* address, unsigned int limit) {
    const unsigned int old = *address;
    *address = old >= limit ? 0 : old + 1;
    return old;
}
void __syncthreads() { block_barrier.wait(); }
int __syncthreads_or(int predicate) {
    static int any = 0;
    if (predicate) any = 1;
    __syncthreads();
    const int result = any;
    __syncthreads();
    any = 0;
    __syncthreads();
    return result;
}
void __syncwarp(unsigned int) { warps[threadIdx.x / 32].barrier.wait(); }

std::uint64_t exchange(std::uint64_t bits, unsigned int from) {
    Warp& warp = warps[threadIdx.x / 32];
    warp.slots[threadIdx.x % 32] = bits;
    warp.barrier.wait();
    bits = warp.slots[from % 32];
    warp.barrier.wait();
    return bits;
}
unsigned int __ballot_sync(unsigned int, bool predicate) {
    Warp& warp = warps[threadIdx.x / 32];
    warp.slots[threadIdx.x % 32] = predicate;
    warp.barrier.wait();
    unsigned int mask = 0;
    for (unsigned int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned int>(warp.slots[lane] & 1) << lane;
    warp.barrier.wait();
    return mask;
}

// ---- a launch --------------------------------------------------------------------------------------
#define EXPORTED extern "C" __attribute__((visibility("default")))
constexpr std::size_t STACK = 64 * 1024;

EXPORTED std::size_t parameter_bytes() { return built.parameters; }
EXPORTED void run(const void* parameters, unsigned gx, unsigned gy, unsigned block) {
    gridDim = {gx, gy, 1};
    blockDim = {block, 1, 1};
    given = parameters;
    const auto stacks = mmap(nullptr, block * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (unsigned int b = 0; b < gx * gy; ++b) {
        blockIdx = {b % gx, b / gx, 0};
        block_barrier = {block};
        warps.clear();
        for (unsigned int w = 0; w < block; w += 32) warps.push_back({{min(32u, block - w)}});
        threads.resize(block);
        for (unsigned int t = 0; t < block; ++t) {
            threads[t].left = false;
            getcontext(&threads[t].context);
            threads[t].context.uc_stack = {static_cast<char*>(stacks) + t * STACK, 0, STACK};
            threads[t].context.uc_link = &launcher;
            makecontext(&threads[t].context, run_thread, 0);
        }
        for (unsigned int left = 0; left < block;) {
            waiting = true;
            for (unsigned int t = 0; t < block; ++t) {
                if (threads[t].left) continue;
                threadIdx = {t, 0, 0};
                swapcontext(&launcher, &threads[t].context);
                left += threads[t].left;
            }
            if (waiting && left < block) {
                std::fputs("the threads of a block wait at barriers that never open\n", stderr);
                std::abort();
            }
        }
    }
    munmap(stacks, block * STACK);
}
