// Linked into every kernel: `run` launches it once.
//
// The threads of a block take turns on one thread of the CPU, each with its own stack: one runs until it must wait at a
// barrier or has left the kernel, then the next. A thread that has left no longer counts at a barrier, as on the device.
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <vector>

#include "shim.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

// ---- turns ---------------------------------------------------------------------------------------
struct Thread { void* stack; bool left; };
static std::vector<Thread> threads;
static void* launcher;              // its stack, while a thread runs
static bool waiting;                // no barrier opened in this round of turns
static const void* given;           // the kernel's parameters

// Keep this stack's pointer, with the registers that a function must leave as they were, and go on with another stack.
// ASan's swapcontext would also forget the bounds of a thread's variables, and takes system calls.
extern "C" void go_on(void** kept, void* other);
asm(".text\n.hidden go_on\n.globl go_on\ngo_on:\n"
    "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
    "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");

struct Barrier {
    unsigned int expected, arrived = 0, phase = 0;
    void open() {
        if (arrived == expected) arrived = 0, ++phase, waiting = false;
    }
    void wait() {
        const unsigned int before = phase;
        ++arrived;
        open();
        while (phase == before) go_on(&threads[threadIdx.x].stack, launcher);
    }
    void leave() { --expected, open(); }
};
// slots: in turn, because a lane may be one exchange ahead. parts: barriers of some lanes, by the first of them.
struct Warp { Barrier barrier; std::uint64_t slots[2][32] = {}; Barrier parts[32] = {}; };
static Barrier block_barrier;
static std::vector<Warp> warps;

static void run_thread() {
    built.call(given);
    threads[threadIdx.x].left = true;
    block_barrier.leave();
    warps[threadIdx.x / 32].barrier.leave();
    go_on(&threads[threadIdx.x].stack, launcher);
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
void __syncwarp(unsigned int mask) {
    Warp& warp = warps[threadIdx.x / 32];
    if (mask == ~0u) return warp.barrier.wait();
    Barrier& part = warp.parts[__builtin_ctz(mask)];
    part.expected = __builtin_popcount(mask);
    part.wait();
}

// What every lane shows.
static const std::uint64_t* shown(std::uint64_t bits) {
    Warp& warp = warps[threadIdx.x / 32];
    auto& slots = warp.slots[warp.barrier.phase % 2];
    slots[threadIdx.x % 32] = bits;
    warp.barrier.wait();
    return slots;
}
std::uint64_t exchange(std::uint64_t bits, unsigned int from) { return shown(bits)[from % 32]; }
unsigned int __ballot_sync(unsigned int, bool predicate) {
    const std::uint64_t* slots = shown(predicate);
    unsigned int mask = 0;
    for (unsigned int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned int>(slots[lane] & 1) << lane;
    return mask;
}

// ---- a launch --------------------------------------------------------------------------------------
#define EXPORTED extern "C" __attribute__((visibility("default")))
constexpr std::size_t STACK = 64 * 1024;

EXPORTED std::size_t parameter_bytes() { return built.parameters; }
EXPORTED void run(const void* parameters, unsigned gx, unsigned gy, unsigned gz, unsigned block) {
    gridDim = {gx, gy, gz};
    blockDim = {block, 1, 1};
    given = parameters;
    const auto stacks = mmap(nullptr, block * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (unsigned int b = 0; b < gx * gy * gz; ++b) {
        blockIdx = {b % gx, b / gx % gy, b / gx / gy};
        block_barrier = {block};
        warps.clear();
        for (unsigned int w = 0; w < block; w += 32) warps.push_back({{min(32u, block - w)}});
        threads.resize(block);
        for (unsigned int t = 0; t < block; ++t) {
            // At a stack's end: no address to return to, run_thread, and six registers.
            const auto end = reinterpret_cast<void**>(static_cast<char*>(stacks) + (t + 1) * STACK);
            end[-2] = reinterpret_cast<void*>(run_thread);
            threads[t] = {end - 8, false};
        }
        for (unsigned int left = 0; left < block;) {
            waiting = true;
            for (unsigned int t = 0; t < block; ++t) {
                if (threads[t].left) continue;
                threadIdx = {t, 0, 0};
                go_on(&launcher, threads[t].stack);
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
