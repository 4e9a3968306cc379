// Gram-Schmidt. The order of a scalar product's sum is that of reference_memory.py. A chunk of a column is the
// work of a block: all threads change it and leave it in shared memory, and there two half warps add up its
// products. A matrix of one chunk is one block's. Of a longer one several blocks take chunks, step after
// step.

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

KERNEL(256) largest_magnitudes(const LargestParams __grid_constant__ params) {
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.count, blockIdx.x);
    const std::int64_t begin = at<std::int64_t>(params.columns)[2 * row];
    const std::int64_t length = at<std::int64_t>(params.columns)[2 * row + 1];
    const std::int64_t first = (blockIdx.x - tiles[row]) * 256 * group + threadIdx.x;
    const float* const x = at<float>(params.p) + begin;
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
    if (threadIdx.x % 32 == 0) atomicMax(to<std::uint32_t>(params.largest) + row, largest);
}

struct KeepParams {
    std::uint64_t
        columns;  // where one begins in the factor, what was kept of it, what is kept, and its length
    std::uint64_t tiles;
    std::int64_t count;
    std::uint64_t factor, kept;
    std::uint64_t largest;  // bits of each column's largest magnitude
};

// kept <- the column scaled by a power of two to a largest magnitude below 1; one of zeros stays what it was.
KERNEL(256) keep(const KeepParams __grid_constant__ params) {
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.count, blockIdx.x);
    const std::int64_t* const column = at<std::int64_t>(params.columns) + 4 * row;
    const std::int64_t first = (blockIdx.x - tiles[row]) * 256 * group + threadIdx.x;
    const std::uint32_t largest = at<std::uint32_t>(params.largest)[row];
    const bool finite = largest < static_cast<std::uint32_t>(float32_overflow);
    const double power = largest == 0 || !finite ? 1.0 : 0.5 * normalising_power(largest);
    const float* const x =
        largest == 0 ? at<float>(params.kept) + column[1] : at<float>(params.factor) + column[0];
    float* const kept = to<float>(params.kept) + column[2];
#pragma unroll
    for (int i = 0; i < group; ++i) {
        const std::int64_t place = first + 256 * i;
        if (place < column[3]) kept[place] = scaled(x[place], power);
    }
}

namespace {

constexpr int threads = 512;
constexpr int each = 8;
static_assert(threads * each == chunk_elements);

struct Shared {
    float x[chunk_elements], other[chunk_elements];
    double sums[2];
    double warps[threads / 32];
    unsigned long long turn;
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

// Change `count` elements from `first` on, a chunk or what there is of it, and add up their products; the
// pending column is finished on the way.
inline void run(const Pass& pass, const Pending& pending, std::int64_t first, int count, Shared& shared) {
    float x[each], removed[each], other[each], unit[each];
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int e = 0; e < each; ++e) {  // all loads before the first value is used
        const int number = thread + e * threads;
        const std::int64_t i = first + number;
        const bool any = number < count;
        x[e] = any ? pass.x[i] : 0.0f;
        removed[e] = any && pass.removed != nullptr ? pass.removed[i] : 0.0f;
        other[e] = any && pass.other != nullptr ? pass.other[i] : 0.0f;
        unit[e] = any && pending.x != nullptr ? pending.x[i] : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < each; ++e) {
        const int number = thread + e * threads;
        const bool any = number < count;
        if (any && pending.x != nullptr) {
            unit[e] = pending.finished(unit[e]);
            pending.x[first + number] = unit[e];
            if (pass.other == pending.x) other[e] = unit[e];
        }
        float changed = scaled(x[e], pass.scale);
        if (pass.removed != nullptr) changed = changed - pass.factor * removed[e];
        if (any) pass.x[first + number] = changed;
        shared.x[number] = any ? changed : 0.0f;
        shared.other[number] = other[e];
    }
    __syncthreads();
    const int kind = thread / 16, lane = thread % 16;
    if (thread < 32) {
        double sum = 0.0;
        if (kind == 0 ? pass.own : pass.other != nullptr) {
            const float* const y = (kind == 0 ? shared.x : shared.other) + lane;
#pragma unroll 8
            for (int i = 0; i < (count + 15) / 16; ++i)
                sum = sum + static_cast<double>(shared.x[lane + 16 * i]) * static_cast<double>(y[16 * i]);
        }
        sum = half_warp_tree(sum);
        if (lane == 0) shared.sums[kind] = sum;
    }
    __syncthreads();
}

// The sum of what chunks left, as a tree of neighbours: blocks of 512 of them first.
inline double sum_of(const double* chunks, std::int64_t count, Shared& shared) {
    ChunkTree tree;
    for (std::int64_t first = 0; first < count; first += threads) {
        const std::int64_t i = first + threadIdx.x;
        double sum = i < count ? chunks[i] : 0.0;
        for (int distance = 1; distance < 32; distance *= 2)
            sum = sum + __shfl_xor_sync(whole_warp, sum, distance);
        __syncthreads();  // of what is read there
        if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = sum;
        __syncthreads();
        tree.add(tree_of(shared.warps));
    }
    return tree.total();
}

// Who does which chunk in which step. Blocks take turns as they come: a turn is a chunk of a step, and no
// block waits for another before that has taken its own, so that it does not matter how many of them run at a
// time.
class Turns {
  public:
    Turns(std::uint64_t* taken, std::int64_t chunks, std::int64_t steps)
        : taken_(reinterpret_cast<unsigned long long*>(taken)), chunks_(chunks), steps_(steps) {}

    bool alone() const { return chunks_ == 1; }
    std::int64_t step() const { return step_; }
    std::int64_t chunk() const { return chunk_; }

    // The next one, when all chunks of the step before are done; false if none is left.
    bool take(Shared& shared) {
        if (alone()) return ++step_ < steps_;
        __syncthreads();  // of the turn before
        if (threadIdx.x == 0) {
            const unsigned long long turn = atomicAdd(taken_, 1ULL);
            const auto chunks = static_cast<unsigned long long>(chunks_);
            const unsigned long long before = turn / chunks * chunks;
            const volatile unsigned long long* const done = taken_ + 1;
            if (turn < chunks * static_cast<unsigned long long>(steps_))
                while (*done < before) {
                }
            __threadfence();  // what others wrote before they said so is read after
            shared.turn = turn;
        }
        __syncthreads();
        step_ = static_cast<std::int64_t>(shared.turn) / chunks_;
        chunk_ = static_cast<std::int64_t>(shared.turn) % chunks_;
        return step_ < steps_;
    }

    void done() {
        if (alone()) return;
        __syncthreads();
        if (threadIdx.x != 0) return;
        __threadfence();  // what this block wrote is there before it says so
        atomicAdd(taken_ + 1, 1ULL);
    }

  private:
    unsigned long long* taken_;  // how many turns, and behind it how many are done
    std::int64_t chunks_, steps_;
    std::int64_t step_ = -1, chunk_ = 0;
};

struct Matrix {
    std::int64_t p_at, rows, rank;
    std::int64_t first;    // the number of its first column
    std::int64_t sums_at;  // of several chunks: 2 + 2 rank sums for each
};

// The columns of a matrix, one after another, each in 2 k + 1 steps; of a column of zeros, in one. One step
// more finishes the last.
class Columns {
  public:
    Columns(const Matrix& matrix, float* p, const std::uint32_t* largest, double* sums)
        : p_(p),
          n_(matrix.rows),
          rank_(matrix.rank),
          largest_(largest),
          sums_(sums),
          chunks_((n_ + chunk_elements - 1) / chunk_elements) {}

    std::int64_t chunks() const { return chunks_; }
    bool finite() const {
        for (std::int64_t k = 0; k < rank_; ++k)
            if (largest_[k] >= static_cast<std::uint32_t>(float32_overflow)) return false;
        return true;
    }
    std::int64_t steps() const {
        std::int64_t count = 1;
        for (std::int64_t k = 0; k < rank_; ++k) count += steps_of(k);
        return count;
    }

    void run_step(std::int64_t step, std::int64_t chunk, Shared& shared) {
        for (; k_ < rank_ && step - begin_ >= steps_of(k_); ++k_) {
            begin_ += steps_of(k_);
            if (largest_[k_] != 0) last_ = k_;
        }
        const std::int64_t first = chunk * chunk_elements, i = step - begin_;
        const int count = static_cast<int>(smaller(chunk_elements, n_ - first));
        if (k_ == rank_) return finish(pending(shared), first, count);
        float* const x = p_ + k_ * n_;
        if (largest_[k_] == 0) {  // -0 becomes +0
            for (int e = static_cast<int>(threadIdx.x); e < count; e += threads) x[first + e] = 0.0f;
            return;
        }
        Pass pass{x, 1.0, nullptr, 0.0f, i == 0 || i == 2 * k_, i < 2 * k_ ? p_ + i % k_ * n_ : nullptr};
        Pending before{nullptr, 0.0};
        if (i == 0) {
            pass.scale = normalising_power(largest_[k_]);
            before = pending(shared);
        } else {
            pass.removed = p_ + (i - 1) % k_ * n_;
            pass.factor = static_cast<float>(alone() ? with_ : sum_of(with(step - 1), chunks_, shared));
        }
        run(pass, before, first, count, shared);
        note(step, i, chunk, shared);
    }

  private:
    bool alone() const { return chunks_ == 1; }
    std::int64_t steps_of(std::int64_t k) const { return largest_[k] == 0 ? 1 : 2 * k + 1; }

    // What the chunks leave in a step, and of x . x before and after a column's subtractions.
    double* with(std::int64_t step) const { return sums_ + step % 2 * chunks_; }
    double* own(std::int64_t k, int after) const { return sums_ + (2 + 2 * k + after) * chunks_; }

    void note(std::int64_t step, std::int64_t i, std::int64_t chunk, const Shared& shared) {
        with_ = shared.sums[1];
        if (i == 0) before_ = shared.sums[0];
        if (i == 2 * k_) after_ = shared.sums[0];
        if (alone() || threadIdx.x != 0) return;
        with(step)[chunk] = with_;
        if (i == 0) own(k_, 0)[chunk] = before_;
        if (i == 2 * k_) own(k_, 1)[chunk] = after_;
    }

    // The last column that is not zero.
    Pending pending(Shared& shared) const {
        if (last_ < 0) return {nullptr, 0.0};
        const double before = __builtin_sqrt(alone() ? before_ : sum_of(own(last_, 0), chunks_, shared));
        const double norm = __builtin_sqrt(alone() ? after_ : sum_of(own(last_, 1), chunks_, shared));
        return {p_ + last_ * n_, norm > dependent * before ? 1.0 / norm : 0.0};
    }

    static void finish(const Pending& pending, std::int64_t first, int count) {
        if (pending.x == nullptr) return;
        for (int e = static_cast<int>(threadIdx.x); e < count; e += threads)
            pending.x[first + e] = pending.finished(pending.x[first + e]);
    }

    float* p_;
    std::int64_t n_, rank_;
    const std::uint32_t* largest_;
    double* sums_;
    std::int64_t chunks_;
    std::int64_t k_ = 0, begin_ = 0, last_ = -1;  // the column, its first step, and the one to be finished
    double with_ = 0.0, before_ = 0.0, after_ = 0.0;  // what a single chunk left
};

}  // namespace

struct OrthogonaliseParams {
    std::uint64_t matrices, tiles;
    std::int64_t count;
    std::uint64_t p;
    std::uint64_t largest;
    std::uint64_t sums;
    std::uint64_t turns;  // two counters for each matrix, from zero on
};

KERNEL(512) orthogonalise(const OrthogonaliseParams __grid_constant__ params) {
    __shared__ Shared shared;
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.count, blockIdx.x);
    const Matrix matrix = at<Matrix>(params.matrices)[row];
    float* const p = to<float>(params.p) + matrix.p_at;
    Columns columns(matrix, p, at<std::uint32_t>(params.largest) + matrix.first,
                    to<double>(params.sums) + matrix.sums_at);
    if (!columns.finite()) {
        const std::int64_t step = threads * (tiles[row + 1] - tiles[row]);
        for (std::int64_t i = threads * (blockIdx.x - tiles[row]) + threadIdx.x;
             i < matrix.rows * matrix.rank; i += step)
            p[i] = float_of(0x7FC00000);
        return;
    }
    Turns turns(to<std::uint64_t>(params.turns) + 2 * row, columns.chunks(), columns.steps());
    while (turns.take(shared)) {
        columns.run_step(turns.step(), turns.chunk(), shared);
        turns.done();
    }
}
