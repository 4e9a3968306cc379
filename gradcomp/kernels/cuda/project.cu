// M Q and M^T P, of matrices with at most GRADCOMP_RANKS columns in P and Q; of more, so many at a time.
// The order of sums is not that of other backends, but the same in every run: blocks write partial sums,
// which a second kernel adds.

#include "matrices.cuh"

#ifndef GRADCOMP_RANKS
#define GRADCOMP_RANKS 4
#endif

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace {

constexpr int ranks = GRADCOMP_RANKS;

// As many as a thread's registers hold beside its sums.
[[maybe_unused]] constexpr int project_rows = ranks <= 8 ? 4 : 2;  // of M
[[maybe_unused]] constexpr int back_columns = ranks <= 8 ? 4 : 2;

// Two blocks of a kernel share a processor's registers, so that enough loads are under way; without that
// where too many sums would not stay in them.
#define PAIRED_KERNEL(when) extern "C" __global__ void __launch_bounds__(256, (when) ? 2 : 1)

}  // namespace

#define PROJECT 1
#define BACK_PROJECT 2
#define ADD_PARTS 3

struct ProjectParams {
    std::uint64_t segments, layers, tiles;
    std::int64_t count;
    std::uint64_t factors;  // by rows of the whole table
    std::uint64_t bad;      // a byte for each of them: something is not finite
    std::uint64_t q, parts;
    double decay;
};

namespace {

using Part = Tile<project_rows>;

// M = factor * gradient + decay * residual, which goes to the next residual too. `wide`: rows are read as vectors.
template <bool wide>
class Contribution {
  public:
    Contribution(const ProjectParams& params, const Part& part)
        : part_(part),
          scale_(at<float>(params.factors)[part.layer.index]),
          decay_(static_cast<float>(params.decay)) {}

    // Four columns from b on; notes the bits of the largest magnitude.
    void make(std::int64_t b, float (&c)[project_rows][4], std::int32_t& largest) const {
        const Segment& segment = part_.segment;
        const std::int64_t count = part_.end - b;
        read_gradient(b, c);
#pragma unroll
        for (auto& row : c)
#pragma unroll
            for (float& each : row) each = scale_ * each;
        if (segment.residual != 0) {
            float r[project_rows][4];
            read_rows(at<float>(segment.residual), b, r);
#pragma unroll
            for (int i = 0; i < project_rows; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) c[i][j] = c[i][j] + decay_ * r[i][j];
        }
#pragma unroll
        for (int i = 0; i < project_rows; ++i) {
            const bool any = i < part_.left;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (!wide && j >= count) c[i][j] = 0.0f;
                const std::int32_t magnitude = bits_of(c[i][j]) & 0x7FFFFFFF;
                if (any && magnitude > largest) largest = magnitude;
            }
            if (any) write_vector<wide>(to<float>(segment.next_residual) + part_.element(i, b), count, c[i]);
        }
    }

    // The same again, when it is in the next residual.
    void read(std::int64_t b, float (&c)[project_rows][4]) const {
        read_rows(at<float>(part_.segment.next_residual), b, c);
    }

  private:
    // All rows' loads before the first value is used.
    template <class T>
    void read_rows(const T* p, std::int64_t b, T (&x)[project_rows][4]) const {
#pragma unroll
        for (int i = 0; i < project_rows; ++i)
            read_vector<wide>(p + part_.element(i, b), part_.end - b, x[i]);
    }

    void read_gradient(std::int64_t b, float (&x)[project_rows][4]) const {
        const Segment& segment = part_.segment;
        if (segment.dtype == Dtype::float32 && segment.gradient != 0)
            return read_rows(at<float>(segment.gradient), b, x);
        std::uint16_t half[project_rows][4] = {};
        if (segment.gradient != 0) read_rows(at<std::uint16_t>(segment.gradient), b, half);
        const bool bfloat = segment.dtype == Dtype::bfloat16;
#pragma unroll
        for (int i = 0; i < project_rows; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                x[i][j] = (bfloat ? from_bfloat16(splat(half[i][j])) : from_half(splat(half[i][j]))).v;
    }

    const Part& part_;
    float scale_, decay_;
};

template <bool wide>
inline void project_part(const ProjectParams& params, const Part& part) {
    const Layer& layer = part.layer;
    const Contribution<wide> contribution(params, part);
    const float* const q = at<float>(params.q) + layer.q_at;
    float* const parts = to<float>(params.parts) + layer.parts_at;
    std::int32_t largest = 0;
    for (std::int64_t first = 0; first == 0 || first < layer.rank; first += ranks) {
        float sums[project_rows][ranks] = {};
        for (std::int64_t b = part.begin; b < part.end; b += part.step) {
            float c[project_rows][4];
            if (first == 0)
                contribution.make(b, c, largest);
            else
                contribution.read(b, c);
            if (layer.rank == 0) continue;
#pragma unroll
            for (int k = 0; k < ranks; ++k) {
                // Columns that do not exist are the last one: a branch would make each wait for the one
                // before.
                float y[4];
                read_vector<wide>(q + smaller(first + k, layer.rank - 1) * layer.columns + b, part.end - b,
                                  y);
#pragma unroll
                for (int i = 0; i < project_rows; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[i][k] = sums[i][k] + c[i][j] * y[j];
            }
        }
#pragma unroll
        for (int k = 0; k < ranks; ++k) {
            if (first + k >= layer.rank) continue;
#pragma unroll
            for (int i = 0; i < project_rows; ++i) {
                float sum = sums[i][k];
                for (int distance = static_cast<int>(layer.lanes) / 2; distance > 0; distance /= 2)
                    sum = sum + __shfl_xor_sync(whole_warp, sum, distance);
                if (i < part.left && lane_of_warp() % layer.lanes == 0)
                    parts[(part.chunk * layer.rank + first + k) * layer.rows + part.first + i] = sum;
            }
        }
    }
    if (largest >= float32_overflow) to<std::uint8_t>(params.bad)[layer.index] = 1;
}

}  // namespace

#if IN_MODULE(PROJECT)
// parts <- M Q of the columns of a block
PAIRED_KERNEL(true) project(const ProjectParams __grid_constant__ params) {
    const Part part(params.segments, params.layers, params.tiles, params.count);
    if (!part.any) return;
    const Segment& segment = part.segment;
    const std::int64_t columns = part.layer.columns;
    const std::uint64_t q = params.q + 4 * static_cast<std::uint64_t>(part.layer.q_at);
    if (rows_are_wide(segment.gradient, columns, segment.dtype) && rows_are_wide(segment.residual, columns) &&
        rows_are_wide(segment.next_residual, columns) && rows_are_wide(q, columns))
        project_part<true>(params, part);
    else
        project_part<false>(params, part);
}
#endif

struct BackProjectParams {
    std::uint64_t segments, layers, tiles;
    std::int64_t count;
    std::int64_t chunk_rows;
    std::uint64_t p, parts;
};

namespace {

[[maybe_unused]] constexpr int group_rows = 4;

// A warp takes back_columns columns per lane, and where there are few of them, other lanes take other rows.
template <bool wide>
inline void back_project_unit(const BackProjectParams& params, const Layer& layer, std::uint64_t next_residual,
                              std::int64_t group, std::int64_t chunk) {
    const std::int64_t lane = lane_of_warp();
    const std::int64_t b = (group * layer.lanes + lane % layer.lanes) * back_columns;
    const std::int64_t width = smaller(back_columns, layer.columns - b);
    const float* const m = at<float>(next_residual) + b;
    const float* const p = at<float>(params.p) + layer.p_at;
    float* const parts = to<float>(params.parts) + layer.parts_at;
    const std::int64_t begin = chunk * params.chunk_rows + group_rows * (lane / layer.lanes);
    const std::int64_t end = width > 0 ? smaller(layer.rows, (chunk + 1) * params.chunk_rows) : begin;
    const std::int64_t step = group_rows * (32 / layer.lanes);

    for (std::int64_t first = 0; first < layer.rank; first += ranks) {
        float sums[ranks][back_columns] = {};
        for (std::int64_t a = begin; a < end; a += step) {
            float x[group_rows][back_columns];
#pragma unroll
            for (int i = 0; i < group_rows; ++i)
                read_vector<wide>(m + smaller(a + i, layer.rows - 1) * layer.columns, width, x[i]);
#pragma unroll
            for (int i = 0; i < group_rows; ++i)
#pragma unroll
                for (int j = 0; j < back_columns; ++j)
                    if (!wide && a + i >= end) x[i][j] = 0.0f;
#pragma unroll
            for (int k = 0; k < ranks; ++k) {
                float y[4];
                read_vector<wide>(p + smaller(first + k, layer.rank - 1) * layer.rows + a, end - a, y);
#pragma unroll
                for (int i = 0; i < group_rows; ++i)
#pragma unroll
                    for (int j = 0; j < back_columns; ++j) sums[k][j] = sums[k][j] + x[i][j] * y[i];
            }
        }
#pragma unroll
        for (int k = 0; k < ranks; ++k) {
            if (first + k >= layer.rank) continue;
#pragma unroll
            for (int j = 0; j < back_columns; ++j) {
                float sum = sums[k][j];
                for (int distance = 16; distance >= layer.lanes; distance /= 2)
                    sum = sum + __shfl_xor_sync(whole_warp, sum, distance);
                if (lane < layer.lanes && j < width)
                    parts[(chunk * layer.rank + first + k) * layer.columns + b + j] = sum;
            }
        }
    }
}

}  // namespace

#if IN_MODULE(BACK_PROJECT)
// parts <- M^T P of some rows
PAIRED_KERNEL(ranks <= 16) back_project(const BackProjectParams __grid_constant__ params) {
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.count, blockIdx.x);
    const Layer layer = at<Layer>(params.layers)[row];
    const std::uint64_t next_residual = at<Segment>(params.segments)[row].next_residual;
    const std::int64_t unit = (blockIdx.x - tiles[row]) * warps + threadIdx.x / 32;
    const std::int64_t groups =
        (layer.columns + back_columns * layer.lanes - 1) / (back_columns * layer.lanes);
    const std::int64_t chunk = unit / groups;
    if (chunk >= layer.chunks) return;
    const bool wide = layer.columns % back_columns == 0 && next_residual % (4 * back_columns) == 0 &&
                      layer.rows % group_rows == 0 && aligned(at<float>(params.p) + layer.p_at, 16);
    if (wide)
        back_project_unit<true>(params, layer, next_residual, unit % groups, chunk);
    else
        back_project_unit<false>(params, layer, next_residual, unit % groups, chunk);
}
#endif

struct Sum {
    std::int64_t index;        // of the row of the whole table
    std::int64_t size;         // numbers of a part, and of the result
    std::int64_t to;           // where the result begins
    std::int64_t parts;        // how many
    std::int64_t parts_at;     // the first
    std::int64_t per_element;  // threads: one, or a warp where there are many parts
};

struct SumParams {
    std::uint64_t sums, tiles;
    std::int64_t count;
    std::uint64_t parts, result;
    std::uint64_t copy;  // of the result, or 0
    std::uint64_t bad;  // a byte per row of the whole table, or 0: the result is NaN
};

#if IN_MODULE(ADD_PARTS)
// result <- the sum of the parts
KERNEL(256) add_parts(const SumParams __grid_constant__ params) {
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.count, blockIdx.x);
    const Sum sum = at<Sum>(params.sums)[row];
    const std::int64_t thread = (blockIdx.x - tiles[row]) * 256 + threadIdx.x;
    const std::int64_t element = thread / sum.per_element;
    if (element >= sum.size) return;  // whole warps, where they work together
    const float* const parts = at<float>(params.parts) + sum.parts_at + element;
    float total = 0.0f;
#pragma unroll 8
    for (std::int64_t i = thread % sum.per_element; i < sum.parts; i += sum.per_element)
        total = total + parts[i * sum.size];
    if (sum.per_element == 32)
        for (int distance = 16; distance > 0; distance /= 2)
            total = total + __shfl_xor_sync(whole_warp, total, distance);
    if (params.bad != 0 && at<std::uint8_t>(params.bad)[sum.index] != 0) total = float_of(0x7FC00000);
    if (thread % sum.per_element != 0) return;
    to<float>(params.result)[sum.to + element] = total;
    if (params.copy != 0) to<float>(params.copy)[sum.to + element] = total;
}
#endif
