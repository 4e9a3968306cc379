// Elements of rows by their indices, in any order, from anywhere: nothing is written before all have been
// checked.

#include "block.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

struct ListParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t offsets, counts, indices, values;
    std::uint64_t bad;       // a word: rows - number of the first that has an index out of range, or 0
    std::uint64_t repeated;  // a byte per row: its indices do not ascend
    std::uint64_t last;      // a byte per item: no later one has its index
};

// A thread's items of a list, 256 apart.
template <class Each>
inline void for_items(const ListParams& params, Each each) {
    constexpr std::int64_t tile_items = 2048;
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.row_count, blockIdx.x);
    const Segment segment = at<Segment>(params.rows)[row];
    const std::int64_t begin = (blockIdx.x - tiles[row]) * tile_items;
    const std::int64_t end = smaller(begin + tile_items, at<std::int64_t>(params.counts)[row]);
    for (std::int64_t item = begin + threadIdx.x; item < end; item += 256)
        each(row, segment, at<std::int64_t>(params.offsets)[row] + item, item);
}

inline bool refused(const ListParams& params) {
    return *at<std::uint32_t>(params.bad) != 0;
}

// For rows in which an index may be repeated: the place of each element holds the number of its last item,
// from 1 on, until values are written.
template <class Each>
inline void for_repeated(const ListParams& params, Each each) {
    if (refused(params)) return;
    for_items(params, [&](std::int64_t row, const Segment& segment, std::int64_t at_, std::int64_t item) {
        if (at<std::uint8_t>(params.repeated)[row] == 0) return;
        each(to<std::uint32_t>(segment.next_residual) + at<std::uint32_t>(params.indices)[at_], at_,
             static_cast<std::uint32_t>(item + 1));
    });
}

}  // namespace gradcomp::cuda

KERNEL(256) check(const ListParams __grid_constant__ params) {
    for_items(params, [&](std::int64_t row, const Segment& segment, std::int64_t at_, std::int64_t item) {
        const std::uint32_t index = at<std::uint32_t>(params.indices)[at_];
        if (index >= segment.length)
            atomicMax(to<std::uint32_t>(params.bad), static_cast<std::uint32_t>(params.row_count - row));
        if (params.repeated != 0 && item > 0 && index <= at<std::uint32_t>(params.indices)[at_ - 1])
            to<std::uint8_t>(params.repeated)[row] = 1;
    });
}

KERNEL(256) take(const ListParams __grid_constant__ params) {
    if (refused(params)) return;
    for_items(params, [&](std::int64_t, const Segment& segment, std::int64_t at_, std::int64_t) {
        to<float>(params.values)[at_] = at<float>(segment.next_residual)[at<std::uint32_t>(params.indices)[at_]];
    });
}

KERNEL(256) clear(const ListParams __grid_constant__ params) {
    for_repeated(params, [](std::uint32_t* place, std::int64_t, std::uint32_t) { *place = 0; });
}

KERNEL(256) claim(const ListParams __grid_constant__ params) {
    for_repeated(params,
                 [](std::uint32_t* place, std::int64_t, std::uint32_t number) { atomicMax(place, number); });
}

KERNEL(256) decide(const ListParams __grid_constant__ params) {
    for_repeated(params, [&](const std::uint32_t* place, std::int64_t at_, std::uint32_t number) {
        to<std::uint8_t>(params.last)[at_] = *place == number ? 1 : 0;
    });
}

KERNEL(256) put(const ListParams __grid_constant__ params) {
    if (refused(params)) return;
    for_items(params, [&](std::int64_t row, const Segment& segment, std::int64_t at_, std::int64_t) {
        if (at<std::uint8_t>(params.repeated)[row] != 0 && at<std::uint8_t>(params.last)[at_] == 0) return;
        to<float>(segment.next_residual)[at<std::uint32_t>(params.indices)[at_]] = at<float>(params.values)[at_];
    });
}
