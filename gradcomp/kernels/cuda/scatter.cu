// Sparse values of several ranks to a dense mean. Lists come from peers: all are checked before anything is
// written.

#include "native/body/finish.hpp"

#include "block.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

struct ScatterParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t flags;       // a byte per row: nothing to scatter, the output is NaN
    std::uint64_t bad;         // a byte per row: something came out that is not finite
    std::uint64_t list_tiles;  // of all lists, those of the first rank first
    std::int64_t ranks;
    std::uint64_t offsets, counts, indices, values;  // a count of 0 stands for what is not looked at
    std::uint64_t refused;                           // a word; see check_lists
    double divisor, scale;
};

inline constexpr int tile_elements = 8 * 256;

// The first item of a list, of those from `begin` to `end`, that is not below the element.
inline std::int64_t lower_bound(const std::uint32_t* indices, std::int64_t begin, std::int64_t end,
                                std::int64_t element) {
    while (begin < end) {
        const std::int64_t middle = begin + (end - begin) / 2;
        if (indices[middle] < element)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

}  // namespace gradcomp::cuda

// The first row with a list that is not ascending, or not below the row's length, has the largest word:
// 2 * (rows - row), and 1 more where it is not ascending. 2048 items per block.
KERNEL(256) check_lists(const ScatterParams __grid_constant__ params) {
    constexpr std::int64_t tile_items = 2048;
    const auto* tiles = at<std::int64_t>(params.list_tiles);
    const std::int64_t list = row_of(tiles, params.ranks * params.row_count, blockIdx.x);
    const std::int64_t row = list % params.row_count;
    const std::int64_t length = at<Segment>(params.rows)[row].length;
    const std::int64_t begin = (blockIdx.x - tiles[list]) * tile_items;
    const std::int64_t end = smaller(begin + tile_items, at<std::int64_t>(params.counts)[list]);
    const std::uint32_t* const indices =
        at<std::uint32_t>(params.indices) + at<std::int64_t>(params.offsets)[list];
    const auto word = static_cast<std::uint32_t>(2 * (params.row_count - row));
    std::uint32_t found = 0;
    for (std::int64_t item = begin + threadIdx.x; item < end; item += 256) {
        const std::uint32_t index = indices[item];
        if (item > 0 && index <= indices[item - 1])
            found = word + 1;
        else if (index >= length && found == 0)
            found = word;
    }
    if (found != 0) atomicMax(to<std::uint32_t>(params.refused), found);
}

// 2048 outputs per block: the ranks' items are added to sums in shared memory, one rank after the other.
KERNEL(256) scatter(const ScatterParams __grid_constant__ params) {
    constexpr int most_lists = 128;  // whose items are looked up together
    constexpr int ahead = 4;         // ranks whose items are read before they are added
    alignas(16) __shared__ float sums[tile_elements];
    __shared__ std::int64_t bounds[2 * most_lists];
    if (*at<std::uint32_t>(params.refused) != 0) return;
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.row_count, blockIdx.x);
    const Segment segment = at<Segment>(params.rows)[row];
    const std::int64_t begin = (blockIdx.x - tiles[row]) * tile_elements;
    const std::int64_t first = begin + 8 * threadIdx.x;
    const std::int64_t count = smaller(group, segment.length - first);
    float x[8];
    if (at<std::uint8_t>(params.flags)[row] != 0) {
        for (float& each : x) each = float_of(0x7FC00000);
        if (count > 0) write_output(segment, first, count, x);
        return;
    }

    for (int i = static_cast<int>(threadIdx.x); i < tile_elements; i += 256) sums[i] = 0.0f;
    const auto* const indices = at<std::uint32_t>(params.indices);
    const auto* const values = at<float>(params.values);
    for (std::int64_t rank = 0; rank < params.ranks; rank += most_lists) {
        const int lists = static_cast<int>(smaller(most_lists, params.ranks - rank));
        __syncthreads();  // of the sums and bounds
        if (static_cast<int>(threadIdx.x) < 2 * lists) {
            const std::int64_t list = (rank + threadIdx.x / 2) * params.row_count + row;
            const std::int64_t offset = at<std::int64_t>(params.offsets)[list];
            bounds[threadIdx.x] = lower_bound(indices, offset, offset + at<std::int64_t>(params.counts)[list],
                                              begin + (threadIdx.x % 2) * tile_elements);
        }
        __syncthreads();
        for (int some = 0; some < lists; some += ahead) {
            std::uint32_t index[ahead] = {};
            float value[ahead] = {};
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                if (some + i >= lists) continue;
                const std::int64_t item = bounds[2 * (some + i)] + threadIdx.x;
                if (item >= bounds[2 * (some + i) + 1]) continue;
                index[i] = indices[item];
                value[i] = values[item];
            }
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                if (some + i >= lists) continue;
                // Those of a list are distinct.
                const std::int64_t end = bounds[2 * (some + i) + 1];
                std::int64_t item = bounds[2 * (some + i)] + threadIdx.x;
                if (item < end) sums[index[i] - begin] += value[i];
                for (item += 256; item < end; item += 256) sums[indices[item] - begin] += values[item];
                __syncthreads();
            }
        }
    }
    __syncthreads();
    if (count <= 0) return;
    const Finish finish(static_cast<float>(params.divisor), static_cast<float>(params.scale));
    read_floats(sums + 8 * threadIdx.x, group, x);
    finish(x);
    bool bad = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) bad |= i < count && overflows(x[i], segment.dtype);
    write_output(segment, first, count, x);
    if (bad) to<std::uint8_t>(params.bad)[row] = 1;
}
