// CUDA's language, as far as the kernels use it, on one CPU thread: every thread of a block is a fiber, and
// blocks run one after another. A fiber runs until it waits for others; who goes next is up to `order`, so
// that what a barrier should have kept apart shows. Included before a flat source, in place of prelude.cuh.
// With CUDA_ON_CPU_PARALLEL each block has a CPU thread of its own, so that blocks which wait for each other
// can be tested; shared memory does not begin as garbage then.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <source_location>
#include <thread>
#include <vector>

#include <link.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
// The struct of a kernel's parameters is passed by reference here, which is an address to whoever launches.
#define __grid_constant__ &
// Thread-local for its own segment of memory: what a block finds there is garbage. Sanitizers know the ends
// of static variables only.
#ifdef CUDA_ON_CPU_SANITIZED
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

#ifdef CUDA_ON_CPU_PARALLEL
#define CUDA_ON_CPU_STATE inline thread_local
#else
#define CUDA_ON_CPU_STATE inline
#endif

struct uint3 {
    unsigned x = 0, y = 0, z = 0;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) double2 {
    double x, y;
};
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
inline double2 make_double2(double x, double y) {
    return {x, y};
}

CUDA_ON_CPU_STATE uint3 threadIdx, blockIdx, blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace cuda_on_cpu {

constexpr std::size_t stack_bytes = 128 << 10;
constexpr unsigned most_threads = 1024;
constexpr int garbage = 0xA7;

struct Fiber {
    ucontext_t begin;
    std::jmp_buf resume;
    std::unique_ptr<char[]> stack;
    bool started = false, done, waiting, block;
    unsigned mask;  // of the warp, while waiting for it
    int vote;       // brought to a barrier of the block
    unsigned line;  // where it waits
};

CUDA_ON_CPU_STATE std::vector<Fiber> fibers;
CUDA_ON_CPU_STATE unsigned threads, running;
CUDA_ON_CPU_STATE std::jmp_buf scheduler;
CUDA_ON_CPU_STATE void (*kernel)(const void*);
CUDA_ON_CPU_STATE const void* argument;
CUDA_ON_CPU_STATE std::uint64_t slots[most_threads];
CUDA_ON_CPU_STATE int votes;  // of the last barrier that all threads reached

inline void yield() {
    Fiber& me = fibers[running];
    const uint3 index = threadIdx;
    if (_setjmp(me.resume) == 0) _longjmp(scheduler, 1);
    threadIdx = index;
}

// Threads that wait for each other do so in one place.
using Where = std::source_location;

inline void wait_for_warp(unsigned mask, Where where) {
    Fiber& me = fibers[running];
    me.line = where.line();
    me.waiting = true;
    me.block = false;
    me.mask = mask;
    yield();
}

inline int wait_for_block(int vote, Where where) {
    Fiber& me = fibers[running];
    me.line = where.line();
    me.waiting = true;
    me.block = true;
    me.vote = vote;
    yield();
    return votes;
}

// A fiber outlives its thread: the next block's thread of the same number goes on in it.
inline void enter() {
    for (;;) {
        kernel(argument);
        fibers[running].done = true;
        yield();
    }
}

inline void run_fiber(unsigned number) {
    Fiber& fiber = fibers[number];
    running = number;
    threadIdx = {number, 0, 0};
    if (_setjmp(scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    setcontext(&fiber.begin);
}

// Let go whoever has waited long enough; false if nobody has.
inline bool release() {
    bool any = false;
    bool all = true;
    for (unsigned i = 0; i < threads; ++i)
        all &= fibers[i].waiting && fibers[i].block && fibers[i].line == fibers[0].line;
    if (all) {
        votes = 0;
        for (unsigned i = 0; i < threads; ++i) {
            votes += fibers[i].vote;
            fibers[i].waiting = false;
            any = true;
        }
        return any;
    }
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        if (fiber.done || !fiber.waiting || fiber.block) continue;
        const unsigned warp = i / 32 * 32, mask = fiber.mask;
        bool met = (mask >> (i % 32) & 1) != 0;
        for (unsigned lane = 0; lane < 32; ++lane) {
            if ((mask >> lane & 1) == 0) continue;
            met &= warp + lane < threads;
            if (!met) break;
            const Fiber& other = fibers[warp + lane];
            // What a thread that has returned would have brought is undefined on a GPU: here nobody waits for
            // it to end.
            met &= !other.done && other.waiting && !other.block && other.mask == mask &&
                   other.line == fiber.line;
        }
        if (!met) continue;
        for (unsigned lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) fibers[warp + lane].waiting = false;
        any = true;
    }
    return any;
}

// Memory that the threads of a block share, that of all kernels in this library.
struct SharedMemory {
    void* begin;
    std::size_t size;
};

inline thread_local char any_of_it;

inline int find_shared(dl_phdr_info* library, std::size_t, void* found) {
    const auto own = reinterpret_cast<std::uintptr_t>(&find_shared) - library->dlpi_addr;
    bool is_own = false;
    for (int i = 0; i < library->dlpi_phnum; ++i) {
        const auto& part = library->dlpi_phdr[i];
        is_own |= part.p_type == PT_LOAD && own - part.p_vaddr < part.p_memsz;
        if (part.p_type == PT_TLS)
            *static_cast<SharedMemory*>(found) = {library->dlpi_tls_data, part.p_memsz};
    }
    return is_own ? 1 : 0;  // else the next one
}

// 0, or 1 if threads wait for each other for ever.
inline int run_block(std::mt19937& random, int order) {
    std::vector<unsigned> queue(threads);
    for (unsigned i = 0; i < threads; ++i) queue[i] = order == 1 ? threads - 1 - i : i;
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        fiber.done = fiber.waiting = false;
        if (fiber.started) continue;
        getcontext(&fiber.begin);
        fiber.begin.uc_stack.ss_sp = fiber.stack.get();
        fiber.begin.uc_stack.ss_size = stack_bytes;
        fiber.begin.uc_link = nullptr;
        makecontext(&fiber.begin, enter, 0);
    }
    for (;;) {
        if (order > 1) std::shuffle(queue.begin(), queue.end(), random);
        bool ran = false, left = false;
        for (const unsigned i : queue) {
            if (fibers[i].done || fibers[i].waiting) continue;
            run_fiber(i);
            ran = true;
        }
        for (unsigned i = 0; i < threads; ++i) left |= !fibers[i].done;
        if (!left) return 0;
        if (release() || ran) continue;
        for (Fiber& fiber : fibers) fiber.started = false;  // nobody comes back to where they are
        return 1;
    }
}

template <class T>
inline T exchange(unsigned mask, T value, unsigned source_lane, Where where) {
    static_assert(sizeof(T) <= 8);
    const unsigned warp = threadIdx.x / 32 * 32;
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    slots[threadIdx.x] = bits;
    wait_for_warp(mask, where);
    const std::uint64_t found = slots[warp + source_lane];
    wait_for_warp(mask, where);
    std::memcpy(&value, &found, sizeof value);
    return value;
}

inline unsigned lane() {
    return threadIdx.x % 32;
}

}  // namespace cuda_on_cpu

namespace cuda_on_cpu {

// Some blocks of a kernel, on this CPU thread.
inline int run_blocks(void (*kernel)(const void*), std::int64_t first, std::int64_t last, std::int64_t blocks,
                      int threads, const void* argument, int order) {
    std::mt19937 random(static_cast<unsigned>(order + first));
    cuda_on_cpu::kernel = kernel;
    cuda_on_cpu::argument = argument;
    cuda_on_cpu::threads = static_cast<unsigned>(threads);
    while (fibers.size() < cuda_on_cpu::threads) {
        fibers.emplace_back();
        fibers.back().stack = std::make_unique_for_overwrite<char[]>(stack_bytes);
    }
    blockDim = {static_cast<unsigned>(threads), 1, 1};
    gridDim = {static_cast<unsigned>(blocks), 1, 1};
#if !defined CUDA_ON_CPU_SANITIZED && !defined CUDA_ON_CPU_PARALLEL
    SharedMemory shared;
    any_of_it = 0;  // it is there from now on
    dl_iterate_phdr(find_shared, &shared);
#endif
    for (std::int64_t block = first; block < last; ++block) {
#if !defined CUDA_ON_CPU_SANITIZED && !defined CUDA_ON_CPU_PARALLEL
        std::memset(shared.begin, garbage, shared.size);
#endif
        blockIdx = {static_cast<unsigned>(order == 1 ? blocks - 1 - block : block), 0, 0};
        if (run_block(random, order) != 0) return 1;
    }
    return 0;
}

}  // namespace cuda_on_cpu

// Runs a kernel; 0, or 1 if a block got stuck. order: 0 threads ascending, 1 descending, else shuffled by
// that seed.
extern "C" inline __attribute__((used)) int cuda_on_cpu_launch(void (*kernel)(const void*),
                                                               std::int64_t blocks, int threads,
                                                               const void* argument, int order) {
#ifdef CUDA_ON_CPU_PARALLEL
    std::atomic<int> stuck = 0;
    std::vector<std::thread> running;
    for (std::int64_t block = 0; block < blocks; ++block)
        running.emplace_back([&, block] {
            stuck |= cuda_on_cpu::run_blocks(kernel, block, block + 1, blocks, threads, argument, order);
        });
    for (auto& each : running) each.join();
    return stuck;
#else
    return cuda_on_cpu::run_blocks(kernel, 0, blocks, blocks, threads, argument, order);
#endif
}

inline void __syncthreads(cuda_on_cpu::Where where = cuda_on_cpu::Where::current()) {
    cuda_on_cpu::wait_for_block(0, where);
}
inline int __syncthreads_or(int vote, cuda_on_cpu::Where where = cuda_on_cpu::Where::current()) {
    return cuda_on_cpu::wait_for_block(vote != 0 ? 1 : 0, where) != 0;
}
inline int __syncthreads_count(int vote, cuda_on_cpu::Where where = cuda_on_cpu::Where::current()) {
    return cuda_on_cpu::wait_for_block(vote != 0 ? 1 : 0, where);
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFF, cuda_on_cpu::Where where = cuda_on_cpu::Where::current()) {
    cuda_on_cpu::wait_for_warp(mask, where);
}
inline void __threadfence() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
}
inline void __threadfence_block() {}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32,
                     cuda_on_cpu::Where where = cuda_on_cpu::Where::current()) {
    const unsigned base = cuda_on_cpu::lane() / static_cast<unsigned>(width) * static_cast<unsigned>(width);
    return cuda_on_cpu::exchange(mask, value,
                                 base + static_cast<unsigned>(source) % static_cast<unsigned>(width), where);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int distance, int = 32,
                         cuda_on_cpu::Where where = cuda_on_cpu::Where::current()) {
    return cuda_on_cpu::exchange(mask, value, cuda_on_cpu::lane() ^ static_cast<unsigned>(distance), where);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32,
                          cuda_on_cpu::Where where = cuda_on_cpu::Where::current()) {
    const unsigned w = static_cast<unsigned>(width), lane = cuda_on_cpu::lane();
    return cuda_on_cpu::exchange(mask, value, lane % w + distance < w ? lane + distance : lane, where);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32,
                        cuda_on_cpu::Where where = cuda_on_cpu::Where::current()) {
    const unsigned w = static_cast<unsigned>(width), lane = cuda_on_cpu::lane();
    return cuda_on_cpu::exchange(mask, value, lane % w >= distance ? lane - distance : lane, where);
}
inline unsigned __ballot_sync(unsigned mask, int vote,
                              cuda_on_cpu::Where where = cuda_on_cpu::Where::current()) {
    const unsigned warp = threadIdx.x / 32 * 32;
    cuda_on_cpu::slots[threadIdx.x] = vote != 0;
    cuda_on_cpu::wait_for_warp(mask, where);
    unsigned found = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) found |= static_cast<unsigned>(cuda_on_cpu::slots[warp + lane]) << lane;
    cuda_on_cpu::wait_for_warp(mask, where);
    return found;
}
inline int __any_sync(unsigned mask, int vote, cuda_on_cpu::Where where = cuda_on_cpu::Where::current()) {
    return __ballot_sync(mask, vote, where) != 0;
}
inline int __all_sync(unsigned mask, int vote, cuda_on_cpu::Where where = cuda_on_cpu::Where::current()) {
    return __ballot_sync(mask, vote, where) == mask;
}

template <class T, class V>
inline T atomicAdd(T* p, V value) {
    return std::atomic_ref<T>(*p).fetch_add(static_cast<T>(value));
}
template <class T, class V>
inline T atomicMax(T* p, V value) {
    T old = *p;
    while (!std::atomic_ref<T>(*p).compare_exchange_weak(old, std::max(old, static_cast<T>(value)))) {
    }
    return old;
}
template <class T, class V>
inline T atomicMin(T* p, V value) {
    const T old = *p;
    *p = std::min(old, static_cast<T>(value));
    return old;
}
template <class T, class V>
inline T atomicOr(T* p, V value) {
    const T old = *p;
    *p = old | static_cast<T>(value);
    return old;
}
template <class T, class V>
inline T atomicExch(T* p, V value) {
    const T old = *p;
    *p = static_cast<T>(value);
    return old;
}
template <class T, class C, class V>
inline T atomicCAS(T* p, C expected, V value) {
    const T old = *p;
    if (old == static_cast<T>(expected)) *p = static_cast<T>(value);
    return old;
}

inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(std::uint64_t{a} * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __popc(unsigned x) {
    return std::popcount(x);
}
inline int __popcll(unsigned long long x) {
    return std::popcount(x);
}
inline int __clz(int x) {
    return std::countl_zero(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
    return std::countl_zero(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) {
    return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1;
}
inline int __ffsll(long long x) {
    return x == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(x)) + 1;
}
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}
inline unsigned __float_as_uint(float x) {
    return std::bit_cast<unsigned>(x);
}
inline int __float_as_int(float x) {
    return std::bit_cast<int>(x);
}
inline float __uint_as_float(unsigned x) {
    return std::bit_cast<float>(x);
}
inline float __int_as_float(int x) {
    return std::bit_cast<float>(x);
}
template <class T>
inline T __ldg(const T* p) {
    return *p;
}
template <class T>
inline T __ldcs(const T* p) {
    return *p;
}
template <class T>
inline void __stcs(T* p, T value) {
    *p = value;
}
// Of prelude.cuh. Addresses are looked at: a line that is fetched is one that is read later.
inline void prefetch_l2(const void* p) {
    [[maybe_unused]] const volatile char found = *static_cast<const volatile char*>(p);
}
