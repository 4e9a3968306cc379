// Contributions, and the largest of them: a radix select over all rows at once.
//
// Three rounds of `histogram` and `pick` find, digit by digit from the top, the key of the last element to be
// selected. The second leaves a bit per element, whether the first digit is large enough; where there is a
// least key, the first does. With these, what comes later passes over most of the memory. `count` and `scan`
// find how many elements each tile contributes, and `write_selection` writes them in their order.

#include "keys.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

// Counts digits. Equal ones that follow each other, zeros above all, cost a thread one addition.
class Digits {
  public:
    Digits(std::uint32_t* bins, const State& state, const SelectParams& params)
        : bins_(bins),
          prefix_(state.prefix),
          shift_(static_cast<int>(params.shift)),
          bits_(static_cast<int>(params.bits)) {}

    void add(std::int32_t key) {
        if (key < 0 || key >> shift_ >> bits_ != prefix_) return;
        const std::int32_t bin = key >> shift_ & ((1 << bits_) - 1);
        if (bin != last_) {
            flush();
            last_ = bin;
        }
        ++run_;
    }

    void flush() {
        if (run_ != 0) atomicAdd(bins_ + last_, run_);
        run_ = 0;
    }

  private:
    std::uint32_t* bins_;
    std::int32_t prefix_;
    int shift_, bits_;
    std::int32_t last_ = 0;
    std::uint32_t run_ = 0;
};

// The parameters come by value: no write to memory can change them.
template <bool contributes, bool counts, bool marks>
inline void pass(const SelectParams params) {
    __shared__ std::uint32_t bins[counts ? most_bins : 1];
    const Tile tile(params);
    State state = {0, 0};
    if constexpr (counts) {
        state = at<State>(params.states)[tile.row];
        const bool found = state.prefix == selects_all || state.prefix == selects_none;
        if (found && (!marks || params.marked != 0)) return;
        for (int i = static_cast<int>(threadIdx.x); i < most_bins; i += 256) bins[i] = 0;
        __syncthreads();
    }
    Digits digits(bins, state, params);
    bool bad = false;
    // Half a warp takes a strip; which of its elements a thread has does not matter to a histogram.
    const std::int64_t own = contributes ? strip * (threadIdx.x / 16) : 8 * std::int64_t{threadIdx.x};
    for (std::int64_t first = tile.begin + own; first < tile.end; first += round_elements) {
        std::int32_t key[8];
        if constexpr (contributes) {
            bad |= tile.contribute(first, key);
        } else {
            float c[8];
            tile.read(first, c, key);
        }
        if constexpr (marks)
            tile.mark(first, key, state.prefix, static_cast<int>(params.shift + params.bits));
        if constexpr (counts) {
#pragma unroll
            for (int i = 0; i < 8; ++i) digits.add(key[i]);
        }
    }
    if (bad) to<std::uint8_t>(params.bad)[tile.row] = 1;
    if constexpr (counts) {
        digits.flush();
        __syncthreads();
        auto* const all = to<std::uint32_t>(params.histograms) + tile.row * most_bins;
        for (int i = static_cast<int>(threadIdx.x); i < 1 << params.bits; i += 256)
            if (bins[i] != 0) atomicAdd(all + i, bins[i]);
    }
}

// How many of eight elements lie above the last key << 16, and how many have it.
inline std::uint32_t above_and_with(const std::int32_t (&key)[8], std::int32_t last) {
    std::uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) found += (key[i] > last ? 1U << 16 : 0U) + (key[i] == last ? 1U : 0U);
    return found;
}

inline std::uint64_t widened(std::uint32_t found) {
    return std::uint64_t{found >> 16} << 32 | (found & 0xFFFF);
}

inline std::int64_t above(std::uint64_t found) {
    return static_cast<std::int64_t>(found >> 32);
}
inline std::int64_t with_last(std::uint64_t found) {
    return static_cast<std::int64_t>(found & 0xFFFFFFFF);
}

}  // namespace gradcomp::cuda

KERNEL(256) contribute(const SelectParams __grid_constant__ params) {
    pass<true, false, false>(params);
}
KERNEL(256) contribute_histogram(const SelectParams __grid_constant__ params) {
    pass<true, true, false>(params);
}
KERNEL(256) histogram(const SelectParams __grid_constant__ params) {
    pass<false, true, false>(params);
}
KERNEL(256) histogram_marking(const SelectParams __grid_constant__ params) {
    pass<false, true, true>(params);
}

// The next digit of a row's last key; the histogram is zero again. One block per row.
KERNEL(256) pick(const SelectParams __grid_constant__ params) {
    const std::int64_t row = blockIdx.x;
    auto* const states = to<State>(params.states);
    const State state = states[row];
    const int bins = 1 << params.bits, own = bins / 256;
    const bool first = params.shift + params.bits == 31;
    if (state.prefix == selects_all || state.prefix == selects_none) return;

    // From the top: the first thread has the largest digits.
    auto* const histogram = to<std::uint32_t>(params.histograms) + row * most_bins;
    const int top = bins - 1 - static_cast<int>(threadIdx.x) * own;
    std::uint32_t size[most_bins / 256], sum = 0, total;
#pragma unroll
    for (int i = 0; i < most_bins / 256; ++i) {
        size[i] = i < own ? histogram[top - i] : 0;
        if (i < own) histogram[top - i] = 0;
        sum += size[i];
    }
    const std::uint32_t before = sum_before(sum, total);
    const std::int64_t want = first ? at<std::int64_t>(params.wanted)[row] : std::int64_t{state.need};
    if (want <= 0 || want > total) {
        if (threadIdx.x == 0) states[row] = {want <= 0 ? selects_none : selects_all, 0};
        return;
    }
    if (want <= before || want > std::int64_t{before} + sum) return;
    std::int64_t left = want - before;
    int i = 0;
    for (; left > size[i]; ++i) left -= size[i];
    states[row] = {state.prefix << params.bits | (top - i), static_cast<std::uint32_t>(left)};
}

KERNEL(256) count(const SelectParams __grid_constant__ params) {
    const Tile tile(params);
    const std::int32_t last = at<State>(params.states)[tile.row].prefix;
    std::uint32_t found = 0;
    for (std::int64_t first = tile.begin + 8 * threadIdx.x; first < tile.end; first += round_elements) {
        float c[8];
        std::int32_t key[8];
        tile.read(first, c, key);
        found += above_and_with(key, last);
    }
    found = reduce_block(found, [](std::uint32_t a, std::uint32_t b) { return a + b; });
    if (threadIdx.x == 0) to<std::uint64_t>(params.tile_counts)[blockIdx.x] = widened(found);
}

// What the tiles before each tile of a row have. One block per row.
KERNEL(256) scan(const SelectParams __grid_constant__ params) {
    const std::int64_t row = blockIdx.x;
    const auto* tiles = at<std::int64_t>(params.tiles);
    std::uint64_t before = 0;
    for (std::int64_t first = tiles[row]; first < tiles[row + 1]; first += 256) {
        const std::int64_t tile = first + threadIdx.x;
        std::uint64_t total;
        const std::uint64_t own = tile < tiles[row + 1] ? at<std::uint64_t>(params.tile_counts)[tile] : 0;
        const std::uint64_t sum = sum_before(own, total);
        if (tile < tiles[row + 1]) to<std::uint64_t>(params.tile_begins)[tile] = before + sum;
        before += total;
    }
    if (params.found != 0 && threadIdx.x == 0) {
        const bool bad = params.bad != 0 && at<std::uint8_t>(params.bad)[row] != 0;
        to<std::int64_t>(params.found)[row] =
            bad ? 0 : above(before) + smaller(with_last(before), at<State>(params.states)[row].need);
    }
}

KERNEL(256) write_selection(const SelectParams __grid_constant__ params) {
    const Tile tile(params);
    const State state = at<State>(params.states)[tile.row];
    const std::int64_t offset = at<std::int64_t>(params.offsets)[tile.row];
    auto* const indices = to<std::uint32_t>(params.indices) + offset;
    auto* const values = to<float>(params.values) + offset;
    if (params.bad != 0 && at<std::uint8_t>(params.bad)[tile.row] != 0) {
        if (params.found != 0) return;  // none are
        const std::int64_t end = smaller(tile.end, at<std::int64_t>(params.wanted)[tile.row]);
        for (std::int64_t i = tile.begin + threadIdx.x; i < end; i += 256) {
            indices[i] = static_cast<std::uint32_t>(i);
            values[i] = 0.0f;
        }
        return;
    }
    const std::uint64_t own = at<std::uint64_t>(params.tile_counts)[blockIdx.x];
    std::uint64_t before = at<std::uint64_t>(params.tile_begins)[blockIdx.x];
    if (above(own) == 0 && (with_last(own) == 0 || with_last(before) >= state.need)) return;
    for (std::int64_t begin = tile.begin; begin < tile.end; begin += round_elements) {
        const std::int64_t first = begin + 8 * threadIdx.x;
        float c[8];
        std::int32_t key[8] = {-2, -2, -2, -2, -2, -2, -2, -2};
        if (first < tile.end) tile.read(first, c, key);
        std::uint32_t total;
        const std::uint64_t here = before + widened(sum_before(above_and_with(key, state.prefix), total));
        before += widened(total);
        std::int64_t larger = above(here), equal = with_last(here);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const bool is_equal = key[i] == state.prefix;
            if (key[i] > state.prefix || (is_equal && equal < state.need)) {
                const std::int64_t place = larger + smaller(equal, state.need);
                indices[place] = static_cast<std::uint32_t>(first + i);
                values[place] = c[i];
            }
            larger += key[i] > state.prefix ? 1 : 0;
            equal += is_equal ? 1 : 0;
        }
    }
}

// The last key as the threshold that it is.
KERNEL(256) threshold(const SelectParams __grid_constant__ params) {
    const std::int64_t row = std::int64_t{blockIdx.x} * 256 + threadIdx.x;
    if (row >= params.row_count) return;
    const std::int32_t key = at<State>(params.states)[row].prefix;
    to<float>(params.values)[row] = float_of(key == selects_none ? infinite : key);
}
