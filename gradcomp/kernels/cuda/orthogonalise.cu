// Gram-Schmidt, a block per matrix. The order of a scalar product's sum is the definition's: sixteen lanes,
// each one addition after another. So two half warps do nothing but add, from shared memory, while the other
// warps change the column and multiply, a tile ahead of them.

#include "native/body/gram_schmidt.hpp"

#include "common.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

struct LargestParams {
    std::uint64_t columns;  // of all matrices: where one begins, and its length
    std::uint64_t tiles;
    std::int64_t count;
    std::uint64_t p;
    std::uint64_t largest;  // bits of each column's largest magnitude, from zero on; NaN is above all
};

KERNEL(256) largest_magnitudes(const LargestParams* params) {
    const auto* tiles = at<std::int64_t>(params->tiles);
    const std::int64_t row = row_of(tiles, params->count, blockIdx.x);
    const std::int64_t begin = at<std::int64_t>(params->columns)[2 * row];
    const std::int64_t length = at<std::int64_t>(params->columns)[2 * row + 1];
    const std::int64_t first = (blockIdx.x - tiles[row]) * 256 * group + threadIdx.x;
    const float* const x = at<float>(params->p) + begin;
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < group; ++i) {
        const std::int64_t place = first + 256 * i;
        const std::uint32_t bits =
            place < length ? static_cast<std::uint32_t>(bits_of(x[place])) & 0x7FFFFFFF : 0;
        largest = bits > largest ? bits : largest;
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        const std::uint32_t other = __shfl_xor_sync(0xFFFFFFFF, largest, distance);
        largest = other > largest ? other : largest;
    }
    if (threadIdx.x % 32 == 0) atomicMax(to<std::uint32_t>(params->largest) + row, largest);
}

namespace {

constexpr int workers = 256 - 32;
constexpr int per_worker = 4;
constexpr int tile = workers * per_worker;
static_assert(tile % 16 == 0);

struct Shared {
    double products[2][2][tile];  // of this tile and the one before; with itself and with another column
    double sums[2];
};

// A column that is finished but for its length: x <- factor * x, or zero if there is nothing of it.
struct Pending {
    float* x;
    double factor;

    float finished(float value) const { return factor == 0.0 ? 0.0f : scaled(value, factor); }
};

// What becomes of a column x, and what it is multiplied with then.
struct Pass {
    float* x;
    double scale;          // x <- scale * x
    const float* removed;  // x <- x - factor * removed, if there is one
    float factor;
    bool own;            // x . x is asked for
    const float* other;  // other . x is asked for, if there is one
};

// Elements that a worker takes of a tile lie this far apart, always the same ones.
inline void work(const Pass& pass, const Pending& pending, std::int64_t n, std::int64_t begin, Shared& shared,
                 int buffer) {
    const int worker = static_cast<int>(threadIdx.x) - 32;
    float x[per_worker], removed[per_worker], other[per_worker], unit[per_worker];
#pragma unroll
    for (int e = 0; e < per_worker; ++e) {
        const std::int64_t i = begin + worker + e * workers;
        const bool any = i < n;
        x[e] = any ? pass.x[i] : 0.0f;
        removed[e] = any && pass.removed != nullptr ? pass.removed[i] : 0.0f;
        other[e] = any && pass.other != nullptr ? pass.other[i] : 0.0f;
        unit[e] = any && pending.x != nullptr ? pending.x[i] : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < per_worker; ++e) {
        const std::int64_t i = begin + worker + e * workers;
        const bool any = i < n;
        if (any && pending.x != nullptr) {
            unit[e] = pending.finished(unit[e]);
            pending.x[i] = unit[e];
            if (pass.other == pending.x) other[e] = unit[e];
        }
        x[e] = scaled(x[e], pass.scale);
        if (pass.removed != nullptr) x[e] = x[e] - pass.factor * removed[e];
        if (any) pass.x[i] = x[e];
        const double wide = static_cast<double>(x[e]);
        const int place = worker + e * workers;
        if (pass.own) shared.products[buffer][0][place] = wide * wide;
        if (pass.other != nullptr) shared.products[buffer][1][place] = wide * static_cast<double>(other[e]);
    }
}

// Change a column, and add up its products; the pending one is finished on the way.
inline void run(const Pass& pass, Pending& pending, std::int64_t n, Shared& shared, double& own,
                double& other) {
    const int which = static_cast<int>(threadIdx.x) / 16, lane = static_cast<int>(threadIdx.x) % 16;
    const bool adds = which == 0 ? pass.own : which == 1 && pass.other != nullptr;
    double sum = 0.0;
    std::int64_t begin = 0;
    for (int buffer = 0; begin < n + tile; begin += tile, buffer ^= 1) {
        if (which >= 2 && begin < n) work(pass, pending, n, begin, shared, buffer);
        if (adds && begin > 0) {
            const double* const products = shared.products[buffer ^ 1][which] + lane;
            const int count = static_cast<int>(smaller(tile, n - (begin - tile)) + 15) / 16;
#pragma unroll 8
            for (int i = 0; i < count; ++i) sum = sum + products[16 * i];
        }
        __syncthreads();
    }
    if (which < 2) {
        sum = half_warp_tree(sum);
        if (lane == 0) shared.sums[which] = sum;
    }
    __syncthreads();
    own = shared.sums[0];
    other = shared.sums[1];
    pending.x = nullptr;
}

inline void fill(float* x, std::int64_t n, float value) {
    for (std::int64_t i = threadIdx.x; i < n; i += 256) x[i] = value;
}

}  // namespace

struct OrthogonaliseParams {
    std::uint64_t matrices;  // where one begins, its rows and columns, and the number of its first column
    std::uint64_t p;
    std::uint64_t largest;
};

KERNEL(256) orthogonalise(const OrthogonaliseParams* params) {
    __shared__ Shared shared;
    const std::int64_t* const matrix = at<std::int64_t>(params->matrices) + 4 * std::int64_t{blockIdx.x};
    float* const p = to<float>(params->p) + matrix[0];
    const std::int64_t n = matrix[1], rank = matrix[2];
    const std::uint32_t* const largest = at<std::uint32_t>(params->largest) + matrix[3];
    for (std::int64_t k = 0; k < rank; ++k)
        if (largest[k] >= static_cast<std::uint32_t>(float32_overflow))
            return fill(p, n * rank, float_of(0x7FC00000));

    Pending pending{nullptr, 0.0};
    for (std::int64_t k = 0; k < rank; ++k) {
        float* const x = p + k * n;
        if (largest[k] == 0) {
            fill(x, n, 0.0f);  // -0 becomes +0
            __syncthreads();
            continue;
        }
        double own, with;
        run({x, normalising_power(largest[k]), nullptr, 0.0f, true, k == 0 ? nullptr : p}, pending, n, shared,
            own, with);
        const double before = __builtin_sqrt(own);
        for (std::int64_t step = 1; step <= 2 * k; ++step) {
            const float* const removed = p + (step - 1) % k * n;
            const bool last = step == 2 * k;
            run({x, 1.0, removed, static_cast<float>(with), last, last ? nullptr : p + step % k * n}, pending,
                n, shared, own, with);
        }
        const double norm = __builtin_sqrt(own);
        pending = {x, norm > dependent * before ? 1.0 / norm : 0.0};
    }
    if (pending.x != nullptr)
#pragma unroll 8
        for (std::int64_t i = threadIdx.x; i < n; i += 256) pending.x[i] = pending.finished(pending.x[i]);
}
