// A threshold per row by bisection, for RedSync: passes of counting and deciding that follow each other
// without the host. gradcomp/compress/sparse/threshold.py says what it looks for.

#include "block.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

inline constexpr std::int64_t tile_elements = 16384;

struct BisectParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t wanted, most;  // elements, at least and at most
    std::uint64_t counts, sums;  // of all magnitudes
    std::uint64_t high;          // the largest magnitude at first
    std::uint64_t found;         // at least the wanted number of elements reach it; 0 at first
    std::uint64_t trial;         // the threshold whose elements are counted; -1: the row is done
    std::uint64_t reached;       // how many there are
};

inline float* floats(std::uint64_t address) {
    return to<float>(address);
}

}  // namespace gradcomp::cuda

// Begin with the mean. One thread per row.
KERNEL(256) bisect_begin(const BisectParams __grid_constant__ params) {
    const std::int64_t row = std::int64_t{blockIdx.x} * 256 + threadIdx.x;
    if (row >= params.row_count) return;
    const std::int64_t length = at<Segment>(params.rows)[row].length;
    const double mean =
        at<double>(params.sums)[row] / static_cast<double>(at<std::int64_t>(params.counts)[row]);
    floats(params.trial)[row] =
        at<std::int64_t>(params.most)[row] < length ? static_cast<float>(mean) : -1.0f;
}

KERNEL(256) bisect_count(const BisectParams __grid_constant__ params) {
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.row_count, blockIdx.x);
    const float trial = at<float>(params.trial)[row];
    if (trial < 0.0f) return;
    const Segment segment = at<Segment>(params.rows)[row];
    const std::int64_t begin = (blockIdx.x - tiles[row]) * tile_elements;
    const std::int64_t end = smaller(begin + tile_elements, segment.length);
    int count = 0;
    for (std::int64_t first = begin + 8 * std::int64_t{threadIdx.x}; first < end; first += 8 * 256) {
        float x[8] = {};
        read_floats(at<float>(segment.next_residual) + first, smaller(group, end - first), x);
#pragma unroll
        for (int i = 0; i < 8; ++i) count += first + i < end && absolute({x[i]}).v >= trial ? 1 : 0;
    }
    count = reduce_block(count, [](int a, int b) { return a + b; });
    if (threadIdx.x == 0) atomicAdd(to<unsigned long long>(params.reached) + row, count);
}

// Halve in on it. One thread per row.
KERNEL(256) bisect_decide(const BisectParams __grid_constant__ params) {
    const std::int64_t row = std::int64_t{blockIdx.x} * 256 + threadIdx.x;
    if (row >= params.row_count) return;
    float& trial = floats(params.trial)[row];
    float& high = floats(params.high)[row];
    float& found = floats(params.found)[row];
    auto& reached = to<unsigned long long>(params.reached)[row];
    if (trial < 0.0f) return;
    const auto count = static_cast<std::int64_t>(reached);
    reached = 0;
    const bool few = count < at<std::int64_t>(params.wanted)[row];
    const bool many = count > at<std::int64_t>(params.most)[row];
    (few ? high : found) = trial;
    const float next = found + (high - found) / 2.0f;
    // Else no threshold is left to try.
    trial = (few || many) && found < next && next < high ? next : -1.0f;
}
