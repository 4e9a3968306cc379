// Gram-Schmidt, a block per matrix. The order of a scalar product's sum is that of reference_sums.py. All
// threads change the column, up to sixteen of its chunks side by side, and leave it in shared memory; there
// two half warps for each chunk add up its products, while the next elements are on their way.

#include "native/body/gram_schmidt.hpp"
#include "native/body/sums.hpp"

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

constexpr int threads = 512;
constexpr int chunks_at_once = threads / 32;
constexpr int each = 8;
constexpr int tile = threads * each;  // elements that are worked on at a time: as many as a chunk has
constexpr int chunk_bits = 12;
static_assert(tile == chunk_elements && tile == 1 << chunk_bits);

struct Shared {
    float x[tile], other[tile];
    double sums[2][chunks_at_once];
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

// Change some elements of a column, of which thread t takes the numbers t, t + threads and so on.
class Work {
  public:
    // Elements place(number) from `first` on, of which `left` are in the column.
    template <class Place>
    void read(const Pass& pass, const Pending& pending, std::int64_t first, int left, Place place) {
#pragma unroll
        for (int e = 0; e < each; ++e) {
            const std::int64_t i = first + place(number(e));
            const bool any = place(number(e)) < left;
            x_[e] = any ? pass.x[i] : 0.0f;
            removed_[e] = any && pass.removed != nullptr ? pass.removed[i] : 0.0f;
            other_[e] = any && pass.other != nullptr ? pass.other[i] : 0.0f;
            unit_[e] = any && pending.x != nullptr ? pending.x[i] : 0.0f;
        }
    }

    template <class Place>
    void write(const Pass& pass, const Pending& pending, std::int64_t first, int left, Place place,
               Shared& shared) {
#pragma unroll
        for (int e = 0; e < each; ++e) {
            const std::int64_t i = first + place(number(e));
            const bool any = place(number(e)) < left;
            if (any && pending.x != nullptr) {
                const float unit = pending.finished(unit_[e]);
                pending.x[i] = unit;
                if (pass.other == pending.x) other_[e] = unit;
            }
            float x = scaled(x_[e], pass.scale);
            if (pass.removed != nullptr) x = x - pass.factor * removed_[e];
            if (any) pass.x[i] = x;
            shared.x[number(e)] = x;
            shared.other[number(e)] = other_[e];
        }
    }

  private:
    static int number(int e) { return static_cast<int>(threadIdx.x) + e * threads; }

    float x_[each], removed_[each], other_[each], unit_[each];
};

// A lane's part of what is added up of a chunk's products with itself, or with the other column.
inline double add_products(double sum, const float* x, const float* y, int count) {
#pragma unroll 8
    for (int i = 0; i < count; ++i)
        sum = sum + static_cast<double>(x[16 * i]) * static_cast<double>(y[16 * i]);
    return sum;
}

// Change a column, and add up its products; the pending one is finished on the way.
inline void run(const Pass& pass, Pending& pending, std::int64_t n, Shared& shared, double& own,
                double& other) {
    const int half_warp = static_cast<int>(threadIdx.x) / 16, lane = static_cast<int>(threadIdx.x) % 16;
    const int chunk = half_warp / 2, kind = half_warp % 2;
    int bits = 0;  // of the number of chunks that are side by side
    while (1 << bits < chunks_at_once && chunk_elements << bits < n) ++bits;
    const int side = 1 << bits, slice = tile >> bits;  // the part of a chunk in a tile
    const bool adds = chunk < side && (kind == 0 ? pass.own : pass.other != nullptr);
    const int mine = chunk * slice + lane;
    ChunkTree trees[2];
    for (std::int64_t first = 0; first < n; first += side * tile) {
        const int left = static_cast<int>(smaller(side * tile, n - first));
        double sum = 0.0;
        for (int begin = 0; begin <= tile; begin += slice) {
            const auto place = [&](int number) {
                return (number >> (chunk_bits - bits)) * tile + begin + (number & (slice - 1));
            };
            const bool works = begin < tile && begin < left;
            const int added = begin - slice;
            if (added >= left) break;
            Work work;
            if (works) work.read(pass, pending, first, left, place);
            if (adds && added >= 0) {
                const int elements = left - chunk * tile - added;
                const int count = ((elements < slice ? elements : slice) + 15) / 16;
                sum = add_products(sum, shared.x + mine, (kind == 0 ? shared.x : shared.other) + mine, count);
            }
            __syncthreads();  // before others write there
            if (works) work.write(pass, pending, first, left, place, shared);
            __syncthreads();
        }
        sum = half_warp_tree(sum);
        if (lane == 0) shared.sums[kind][chunk] = sum;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i) trees[i].add(tree_of(shared.sums[i]));
        __syncthreads();
    }
    own = trees[0].total();
    other = trees[1].total();
    pending.x = nullptr;
}

inline void fill(float* x, std::int64_t n, float value) {
    for (std::int64_t i = threadIdx.x; i < n; i += threads) x[i] = value;
}

}  // namespace

struct OrthogonaliseParams {
    std::uint64_t matrices;  // where one begins, its rows and columns, and the number of its first column
    std::uint64_t p;
    std::uint64_t largest;
};

KERNEL(512) orthogonalise(const OrthogonaliseParams* params) {
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
        for (std::int64_t i = threadIdx.x; i < n; i += threads) pending.x[i] = pending.finished(pending.x[i]);
}
