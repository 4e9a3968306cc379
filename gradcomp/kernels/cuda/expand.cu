// P Q^T: every product and sum is rounded on its own, over the columns from the first to the last.

#include "native/body/finish.hpp"

#include "matrices.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

struct ProductParams {
    std::uint64_t segments, layers, tiles;
    std::int64_t count;
    std::uint64_t p, q;
    std::uint64_t flags;  // a byte per row of the whole table: the output is NaN
    std::uint64_t bad;    // a byte per row: something came out that is not finite
    double divisor, scale;
};

namespace {

constexpr int rows = 4;

using Part = Tile<rows>;

// Four columns from b on of the thread's rows. `wide`: all of them exist, and P and Q are read as vectors.
template <bool wide>
class Product {
  public:
    Product(const ProductParams& params, const Part& part)
        : part_(part),
          p_(at<float>(params.p) + part.layer.p_at + part.first),
          q_(at<float>(params.q) + part.layer.q_at) {}

    void operator()(std::int64_t b, float (&x)[rows][4]) const {
        for (auto& row : x)
            for (float& each : row) each = 0.0f;
        if (part_.layer.rank == 0) return;
        float p[4], q[4];
        read(0, b, p, q);
#pragma unroll
        for (int i = 0; i < rows; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) x[i][j] = p[i] * q[j];
#pragma unroll 4
        for (std::int64_t k = 1; k < part_.layer.rank; ++k) {
            read(k, b, p, q);
#pragma unroll
            for (int i = 0; i < rows; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) x[i][j] = x[i][j] + p[i] * q[j];
        }
    }

  private:
    void read(std::int64_t k, std::int64_t b, float (&p)[4], float (&q)[4]) const {
        read_vector<wide>(p_ + k * part_.layer.rows, part_.left, p);
        read_vector<wide>(q_ + k * part_.layer.columns + b, part_.end - b, q);
    }

    const Part& part_;
    const float *p_, *q_;
};

// Whether P and Q, and the rows of what is written, are vectors throughout.
inline bool all_wide(const ProductParams& params, const Part& part, std::uint64_t rows_at, Dtype dtype) {
    return part.layer.rows % 4 == 0 && aligned(at<float>(params.p) + part.layer.p_at, 16) &&
           aligned(at<float>(params.q) + part.layer.q_at, 16) &&
           rows_are_wide(rows_at, part.layer.columns, dtype);
}

template <bool wide>
inline void write_output(const Segment& segment, std::int64_t at_, std::int64_t count, const float (&x)[4]) {
    if (segment.dtype == Dtype::float32) return write_vector<wide>(to<float>(segment.output) + at_, count, x);
    std::uint16_t half[4];
    to_halves(x, segment.dtype, half);
    write_vector<wide>(to<std::uint16_t>(segment.output) + at_, count, half);
}

// NaN, for a layer that is flagged.
template <bool wide>
inline void fill_part(const Part& part) {
    float x[4];
    for (float& each : x) each = float_of(0x7FC00000);
    for (std::int64_t b = part.begin; b < part.end; b += part.step)
#pragma unroll
        for (int i = 0; i < rows; ++i)
            if (i < part.left) write_output<wide>(part.segment, part.element(i, b), part.end - b, x);
}

template <bool wide>
inline void expand_part(const ProductParams& params, const Part& part) {
    const Segment& segment = part.segment;
    if (at<std::uint8_t>(params.flags)[part.layer.index] != 0) return fill_part<wide>(part);
    const Product<wide> product(params, part);
    const Finish finish(static_cast<float>(params.divisor), static_cast<float>(params.scale));
    bool bad = false;
    for (std::int64_t b = part.begin; b < part.end; b += part.step) {
        float x[rows][4];
        product(b, x);
        finish(reinterpret_cast<float (&)[4 * rows]>(x));  // tests the divisor once for all of them
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            if (!wide && i >= part.left) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                bad |= (wide || b + j < part.end) && overflows(x[i][j], segment.dtype);
            write_output<wide>(segment, part.element(i, b), part.end - b, x[i]);
        }
    }
    if (bad) to<std::uint8_t>(params.bad)[part.layer.index] = 1;
}

template <bool wide>
inline void subtract_part(const ProductParams& params, const Part& part) {
    auto* const next_residual = to<float>(part.segment.next_residual);
    const Product<wide> product(params, part);
    for (std::int64_t b = part.begin; b < part.end; b += part.step) {
        const std::int64_t count = part.end - b;
        float x[rows][4], m[rows][4];
#pragma unroll
        for (int i = 0; i < rows; ++i) read_vector<wide>(next_residual + part.element(i, b), count, m[i]);
        product(b, x);
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            if (i >= part.left) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j) x[i][j] = m[i][j] - x[i][j];
            write_vector<wide>(next_residual + part.element(i, b), count, x[i]);
        }
    }
}

}  // namespace

// output <- scale * ((P Q^T) / divisor)
KERNEL(256, 2) expand(const ProductParams __grid_constant__ params) {
    const Part part(params.segments, params.layers, params.tiles, params.count);
    if (part.left <= 0) return;
    if (all_wide(params, part, part.segment.output, part.segment.dtype))
        expand_part<true>(params, part);
    else
        expand_part<false>(params, part);
}

// next residual <- next residual - P Q^T
KERNEL(256) subtract(const ProductParams __grid_constant__ params) {
    const Part part(params.segments, params.layers, params.tiles, params.count);
    if (part.left <= 0) return;
    if (all_wide(params, part, part.segment.next_residual, Dtype::float32))
        subtract_part<true>(params, part);
    else
        subtract_part<false>(params, part);
}
