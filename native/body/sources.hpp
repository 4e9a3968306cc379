// The two sources of contributions: a rank's own gradient, and the mean of what the ranks sent.
#pragma once

#include <span>
#include <vector>

#include "decode.hpp"
#include "encode.hpp"

namespace gradcomp::GRADCOMP_BODY {

// The vector at p; of the last one in a block only `count` elements exist, and zeros stand for the others.
template <class Element>
inline I32 load_part(const Element* p, std::int64_t count) {
    if (count >= lanes) return load_widen(p);
    Element part[lanes] = {};
    std::memcpy(part, p, static_cast<std::size_t>(count) * sizeof(Element));
    return load_widen(part);
}

// c = scale * gradient + decay * residual
class Gradient final : public Source {
  public:
    Gradient(const Segment& segment, float scale, float decay)
        : segment_(segment),
          scale_(splat(scale)),
          decay_(splat(decay)),
          in_place_(segment.dtype == Dtype::float32 && segment.gradient != 0 && segment.residual == 0 &&
                    scale == 1.0f) {}

    const float* block(std::int64_t first, std::int64_t count, float* scratch) const override {
        if (in_place_ && count % lanes == 0) return gradient<float>(first);
        if (segment_.gradient == 0) {
            static constexpr std::uint32_t zeros[block_size] = {};
            read(zeros, first, count, scratch, [](I32 x) { return as_float(x); });
        } else if (segment_.dtype == Dtype::float16) {
            read(gradient<std::uint16_t>(first), first, count, scratch, [](I32 x) { return from_half(x); });
        } else if (segment_.dtype == Dtype::bfloat16) {
            read(gradient<std::uint16_t>(first), first, count, scratch,
                 [](I32 x) { return from_bfloat16(x); });
        } else {
            read(gradient<std::uint32_t>(first), first, count, scratch, [](I32 x) { return as_float(x); });
        }
        return scratch;
    }

  private:
    template <class Element>
    const Element* gradient(std::int64_t first) const {
        return reinterpret_cast<const Element*>(segment_.gradient) + first;
    }

    template <class Element, class Convert>
    void read(const Element* g, std::int64_t first, std::int64_t count, float* c, Convert convert) const {
        if (segment_.residual == 0) {
            for (std::int64_t i = 0; i < count; i += lanes)
                store(c + i, scale_ * convert(load_part(g + i, count - i)));
            return;
        }
        const auto* r = reinterpret_cast<const std::uint32_t*>(segment_.residual) + first;
        for (std::int64_t i = 0; i < count; i += lanes)
            store(c + i, scale_ * convert(load_part(g + i, count - i)) +
                             decay_ * as_float(load_part(r + i, count - i)));
    }

    const Segment& segment_;
    F32 scale_, decay_;
    bool in_place_;
};

// c = (value_0 + value_1 + ...) / divisor + decay * residual
template <class Codec>
class Mean final : public Source {
  public:
    Mean(const Piece& piece, const Level& level, std::span<const std::uint8_t* const> payloads, float divisor,
         float decay)
        : segment_(piece.segment),
          level_(level),
          payloads_(payloads),
          scales_(piece.scales),
          codes_(piece.codes),
          divisor_(splat(divisor)),
          decay_(splat(decay)) {}

    const float* block(std::int64_t first, std::int64_t count, float* scratch) const override {
        read_values<Codec>(segment_, view(payloads_[0]), first, count, scratch);
        for (const std::uint8_t* payload : payloads_.subspan(1)) {
            alignas(64) float values[block_capacity];
            read_values<Codec>(segment_, view(payload), first, count, values);
            for (std::int64_t i = 0; i < count; i += lanes)
                store(scratch + i, load(scratch + i) + load(values + i));
        }
        for (std::int64_t i = 0; i < count; i += lanes) store(scratch + i, load(scratch + i) / divisor_);
        if (segment_.residual != 0) {
            const auto* r = reinterpret_cast<const std::uint32_t*>(segment_.residual) + first;
            for (std::int64_t i = 0; i < count; i += lanes)
                store(scratch + i, load(scratch + i) + decay_ * as_float(load_part(r + i, count - i)));
        }
        return scratch;
    }

  private:
    PayloadView view(const std::uint8_t* payload) const {
        return view_of<Codec>(segment_, level_, payload, scales_, codes_);
    }

    const Segment& segment_;
    Level level_;
    std::span<const std::uint8_t* const> payloads_;
    std::int64_t scales_, codes_;
    F32 divisor_, decay_;
};

// What another source has, computed once, for encoders that go through a segment twice.
class Kept final : public Source {
  public:
    // `c`: memory for the contributions. The first pass is in order.
    Kept(const Source& source, std::int64_t length, std::vector<float>& c) : source_(source) {
        c.resize(static_cast<std::size_t>(length + block_capacity));
        c_ = c.data();
    }

    const float* block(std::int64_t first, std::int64_t count, float* scratch) const override {
        const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
        if (first == done_) {
            const float* const found = source_.block(first, count, c_ + first);
            if (found != c_ + first) std::memcpy(c_ + first, found, bytes);
            done_ += count;
        }
        if (count % lanes == 0) return c_ + first;
        std::memcpy(scratch, c_ + first, bytes);
        return scratch;
    }

  private:
    const Source& source_;
    float* c_;
    mutable std::int64_t done_ = 0;
};

// Of all contributions of a source; not finite if one of them is not.
inline float largest_magnitude(const Source& source, std::int64_t length) {
    alignas(64) float scratch[block_capacity];
    LInfNorm range;
    for (std::int64_t first = 0; first < length; first += block_size) {
        const std::int64_t count = smaller(block_size, length - first);
        const float* const c = source.block(first, count, scratch);
        for (std::int64_t i = count; i < whole_vectors(count); ++i) scratch[i] = LInfNorm::padding(scratch);
        for (std::int64_t i = 0; i < count; i += lanes) range.add(load(c + i));
    }
    return range.norm();
}

}  // namespace gradcomp::GRADCOMP_BODY
