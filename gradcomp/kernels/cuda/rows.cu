// Kernels that work on whole rows and do not depend on a codec, and those of float64.

#include "common.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

struct DiscardParams {
    std::uint64_t bad;
    std::uint64_t payload;
    std::uint64_t begins, sizes;  // of each row's payload
};

// Zero the payloads of rows that are not finite. One block per row.
KERNEL(256) discard(const DiscardParams __grid_constant__ params) {
    if (at<std::uint8_t>(params.bad)[blockIdx.x] == 0) return;
    auto* const payload = to<std::uint8_t>(params.payload) + at<std::int64_t>(params.begins)[blockIdx.x];
    for (std::int64_t i = threadIdx.x; i < at<std::int64_t>(params.sizes)[blockIdx.x]; i += 256)
        payload[i] = 0;
}

struct CollectParams {
    std::uint64_t bad;
    std::uint64_t rows;  // numbers that the rows have elsewhere
    std::int64_t row_count;
    std::uint64_t found;  // by those numbers
};

KERNEL(256) collect(const CollectParams __grid_constant__ params) {
    const std::int64_t row = std::int64_t{blockIdx.x} * 256 + threadIdx.x;
    if (row < params.row_count)
        to<std::uint8_t>(params.found)[at<std::int64_t>(params.rows)[row]] =
            at<std::uint8_t>(params.bad)[row];
}

struct NonzeroParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t found;
};

namespace {

// Whether one of up to eight elements is not zero.
inline bool any_nonzero(const Segment& segment, std::int64_t first) {
    const std::int64_t count = smaller(group, segment.length - first);
    bool any = false;
    if (segment.dtype == Dtype::float64) {
        for (std::int64_t i = first; i < first + count; ++i) any |= at<double>(segment.gradient)[i] != 0.0;
    } else {
        float x[8];
        read_gradient(segment, first, count, x);
        for (int i = 0; i < count; ++i) any |= x[i] != 0.0f;
    }
    return any;
}

}  // namespace

// Whether a row has an element that is not zero; NaN is not. A row's blocks go through it together, eight
// elements per thread, and stop at the first that one of them has found.
KERNEL(256) nonzero(const NonzeroParams __grid_constant__ params) {
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.row_count, blockIdx.x);
    const Segment segment = at<Segment>(params.rows)[row];
    if (segment.gradient == 0) return;
    volatile std::uint8_t* const found = to<std::uint8_t>(params.found) + row;  // others write it meanwhile
    const std::int64_t step = 8 * 256 * (tiles[row + 1] - tiles[row]);
    for (std::int64_t first = 8 * ((blockIdx.x - tiles[row]) * 256 + threadIdx.x);
         first < segment.length && *found == 0; first += step)
        if (any_nonzero(segment, first)) *found = 1;
}

// The codec of float64, which copies: contributions, values and outputs are doubles, residuals stay float32.
// Payloads are not aligned.

struct DoublesParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t payload, flags, bad;
    std::uint64_t payloads;
    std::int64_t payload_count;
    double scale, decay, divisor;
};

namespace {

struct Double {
    Segment segment;
    std::int64_t row, i;

    explicit Double(const DoublesParams& params) {
        const auto* tiles = at<std::int64_t>(params.tiles);
        row = row_of(tiles, params.row_count, blockIdx.x);
        segment = at<Segment>(params.rows)[row];
        i = (blockIdx.x - tiles[row]) * 256 + threadIdx.x;
    }
};

inline double read_double(std::uint64_t p) {
    double x;
    std::memcpy(&x, at<std::uint8_t>(p), sizeof x);
    return x;
}

inline void write_double(std::uint64_t p, double x) {
    std::memcpy(to<std::uint8_t>(p), &x, sizeof x);
}

inline bool is_finite(double x) {
    return __builtin_bit_cast(std::uint64_t, x) << 1 < 0xFFE0000000000000;
}

inline void encode_double(const DoublesParams& params, const Double& at_, double c) {
    const Segment& segment = at_.segment;
    if (segment.residual != 0) c = c + params.decay * static_cast<double>(at<float>(segment.residual)[at_.i]);
    if (segment.next_residual != 0) to<float>(segment.next_residual)[at_.i] = 0.0f;
    write_double(params.payload + static_cast<std::uint64_t>(segment.payload + 8 * at_.i), c);
    if (!is_finite(c)) to<std::uint8_t>(params.bad)[at_.row] = 1;
}

}  // namespace

KERNEL(256) encode_doubles(const DoublesParams __grid_constant__ params) {
    const Double element(params);
    if (element.i >= element.segment.length) return;
    const std::uint64_t gradient = element.segment.gradient;
    const double g = gradient == 0 ? 0.0 : at<double>(gradient)[element.i];
    encode_double(params, element, params.scale * g);
}

KERNEL(256) reduce_doubles(const DoublesParams __grid_constant__ params) {
    const Double element(params);
    if (element.i >= element.segment.length) return;
    const auto place = static_cast<std::uint64_t>(element.segment.payload + 8 * element.i);
    const std::uint64_t* const payloads = at<std::uint64_t>(params.payloads);
    double c = read_double(payloads[0] + place);
    for (std::int64_t sender = 1; sender < params.payload_count; ++sender)
        c = c + read_double(payloads[sender] + place);
    encode_double(params, element, c / params.divisor);
}

KERNEL(256) decode_doubles(const DoublesParams __grid_constant__ params) {
    const Double element(params);
    if (element.i >= element.segment.length) return;
    double x = __builtin_bit_cast(double, std::uint64_t{0x7FF8000000000000});
    if (at<std::uint8_t>(params.flags)[element.row] == 0) {
        x = read_double(params.payload + static_cast<std::uint64_t>(element.segment.payload + 8 * element.i));
        x = x / params.divisor * params.scale;
        if (!is_finite(x)) to<std::uint8_t>(params.bad)[element.row] = 1;
    }
    to<double>(element.segment.output)[element.i] = x;
}
