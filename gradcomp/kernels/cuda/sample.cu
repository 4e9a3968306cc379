// The check value of a sample of each layer's elements: sums of integers, which no order of threads changes.

#include "common.cuh"
#include "native/body/sample.hpp"

using namespace gradcomp;
using namespace gradcomp::cuda;

struct SampleParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t values;  // a sum for each row, zero before
    std::int64_t turn;
};

// A tile is 256 of a row's blocks of elements, one for each thread.
KERNEL(256) sample(const SampleParams __grid_constant__ params) {
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.row_count, blockIdx.x);
    const Segment segment = at<Segment>(params.rows)[row];
    const Sample part(segment.length, static_cast<std::uint32_t>(params.turn));
    const std::int64_t block = (blockIdx.x - tiles[row]) * 256 + threadIdx.x;
    if (block >= part.blocks) return;
    atomicAdd(to<std::uint32_t>(params.values) + row, sampled(segment, part, block));
}
