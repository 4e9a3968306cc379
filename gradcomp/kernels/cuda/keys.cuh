// Elements as a selection sees them. The key of one is the bits of its magnitude, which order as magnitudes
// do, and -1 if it is no candidate.
#pragma once

#include "block.cuh"

namespace gradcomp::cuda {

inline constexpr std::int64_t tile_elements = 16384;
inline constexpr std::int64_t round_elements = 8 * 256;  // that a block reads at once
inline constexpr int most_bins = 2048;
inline constexpr std::int32_t infinite = 0x7F800000;

// Keys of a row's last element that no element has.
inline constexpr std::int32_t selects_all = -1;
inline constexpr std::int32_t selects_none = 0x7FFFFFFF;

// How far a row is.
struct State {
    std::int32_t prefix;  // of the last element's key; in the end all of it
    std::uint32_t need;   // how many of the elements with this prefix are selected
};

struct SelectParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t factors;  // of gradients
    double decay;
    std::uint64_t bad;      // a byte per row: something is not finite; 0: none
    std::uint64_t wanted;   // how many elements, at most
    std::uint64_t cuts;     // the least key of a candidate, per row; 0: any
    std::uint64_t strides;  // distance of a row's elements; 0: they are next to each other
    std::int64_t nan_is_infinite;
    std::uint64_t marks;        // a bit per element: candidates, as far as is known
    std::uint64_t mark_begins;  // of each row's, in bytes
    std::int64_t marked;        // whether marks have been written
    std::uint64_t histograms, states;
    std::uint64_t tile_counts, tile_begins;  // above the last key << 32 | with it
    std::uint64_t offsets, indices, values, found;
    std::int64_t shift, bits;  // of the digit
};

// Some elements of a row, and what holds for all of them.
class Tile {
  public:
    std::int64_t row, begin, end;

    explicit Tile(const SelectParams& params) {
        const auto* tiles = at<std::int64_t>(params.tiles);
        row = row_of(tiles, params.row_count, blockIdx.x);
        segment_ = at<Segment>(params.rows)[row];
        begin = (blockIdx.x - tiles[row]) * tile_elements;
        end = smaller(begin + tile_elements, segment_.length);
        factor_ = params.factors == 0 ? 0.0f : at<float>(params.factors)[row];
        decay_ = static_cast<float>(params.decay);
        cut_ = params.cuts == 0 ? 0 : at<std::int32_t>(params.cuts)[row];
        stride_ = params.strides == 0 ? 1 : at<std::int64_t>(params.strides)[row];
        nan_is_infinite_ = params.nan_is_infinite != 0;
        marked_ = params.marked != 0;
        if (params.marks != 0)
            marks_ = to<std::uint8_t>(params.marks) + at<std::int64_t>(params.mark_begins)[row];
    }

    // c = factor * gradient + decay * residual, into the next residual; whether something is not finite.
    // Eight of the strip that begins here, in no order.
    bool contribute(std::int64_t strip_begin, std::int32_t (&key)[8]) const {
        float c[8], r[8] = {};
        float* const next_residual = to<float>(segment_.next_residual) + strip_begin;
        const float* const residual = at<float>(segment_.residual) + strip_begin;
        const bool any_residual = segment_.residual != 0;
        const bool vectors = end - strip_begin >= strip && segment_.gradient != 0 &&
                             is_vector(segment_.gradient, strip_begin, segment_.dtype) &&
                             aligned(next_residual, 16) && (!any_residual || aligned(residual, 16));
        const std::int64_t first = strip_begin + place_in_strip();
        const int count = vectors ? static_cast<int>(group) : count_of(end - first);
        if (vectors) {
            if (segment_.dtype == Dtype::float32)
                load_vectors(at<float>(segment_.gradient) + strip_begin, c);
            else
                load_vectors(at<std::uint16_t>(segment_.gradient) + strip_begin, c, segment_.dtype);
            if (any_residual) load_vectors(residual, r);
        } else {
            read_gradient(segment_, first, count, c);
            if (any_residual) read_floats(at<float>(segment_.residual) + first, count, r);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) c[i] = factor_ * c[i];
        if (any_residual) {
#pragma unroll
            for (int i = 0; i < 8; ++i) c[i] = c[i] + decay_ * r[i];
        }
        if (vectors)
            store_vectors(next_residual, c);
        else
            write_floats(to<float>(segment_.next_residual) + first, count, c);
        bool bad = false;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            bad |= i < count && !is_finite(c[i]);
            const std::int32_t bits = bits_of(c[i]) & 0x7FFFFFFF;
            key[i] = i < count && bits >= cut_ ? bits : -1;
        }
        return bad;
    }

    // Elements, 0 if they are no candidates, and keys.
    void read(std::int64_t first, float (&c)[8], std::int32_t (&key)[8]) const {
        const std::int64_t count = smaller(group, end - first);
        const std::uint32_t marks = marked_ ? marks_[first / 8] : 0xFF;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            c[i] = 0.0f;
            key[i] = -1;
        }
        if (marks == 0) return;
        const float* const elements = at<float>(segment_.next_residual);
        if (stride_ == 1) {
            read_floats(elements + first, count, c);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < count) c[i] = elements[(first + i) * stride_];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            std::int32_t bits = bits_of(c[i]) & 0x7FFFFFFF;
            if (nan_is_infinite_ && bits > infinite) bits = infinite;
            if (i < count && (marks >> i & 1) != 0 && bits >= cut_ && bits <= infinite) key[i] = bits;
        }
    }

    // Of elements that have been read, only those with at least this prefix are candidates from now on.
    void mark(std::int64_t first, const std::int32_t (&key)[8], std::int32_t prefix, int shift) const {
        std::uint32_t marks = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (key[i] >= 0 && key[i] >> shift >= prefix) marks |= 1U << i;
        marks_[first / 8] = static_cast<std::uint8_t>(marks);
    }

  private:
    Segment segment_;
    float factor_, decay_;
    std::int32_t cut_;
    std::int64_t stride_;
    bool nan_is_infinite_, marked_;
    std::uint8_t* marks_ = nullptr;
};

}  // namespace gradcomp::cuda
