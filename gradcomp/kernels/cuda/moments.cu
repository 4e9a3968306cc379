// Sums of values and of their squares; a block leaves partial sums, which the host adds up in order.

#include "common.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

struct MomentParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t partial;  // tiles x 2 doubles
};

// Eight groups of eight elements per thread, a block's side by side.
KERNEL(256) moments(const MomentParams __grid_constant__ params) {
    __shared__ double sums[16][2];
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.row_count, blockIdx.x);
    const Segment segment = at<Segment>(params.rows)[row];
    const std::int64_t begin = (blockIdx.x - tiles[row]) * 256 * 64;
    double sum = 0.0, squares = 0.0;
    for (int k = 0; k < 8; ++k) {
        const std::int64_t first = begin + 8 * (256 * k + threadIdx.x);
        if (first >= segment.length) break;
        float x[8];
        read_gradient(segment, first, smaller(group, segment.length - first), x);
        for (int i = 0; i < 8; ++i) {
            const double wide = first + i < segment.length ? static_cast<double>(x[i]) : 0.0;
            sum += wide;
            squares += wide * wide;
        }
    }
    const auto add = [](double a, double b) { return a + b; };
    sum = reduce_team(sum, add);
    squares = reduce_team(squares, add);
    if (threadIdx.x % 16 == 0) {
        sums[threadIdx.x / 16][0] = sum;
        sums[threadIdx.x / 16][1] = squares;
    }
    __syncthreads();
    if (threadIdx.x >= 2) return;
    double all = 0.0;
    for (int team = 0; team < 16; ++team) all += sums[team][threadIdx.x];
    to<double>(params.partial)[2 * std::int64_t{blockIdx.x} + threadIdx.x] = all;
}
