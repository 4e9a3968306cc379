// The two sources of contributions: a rank's own gradient, and the mean of what the ranks sent.
#pragma once

#include "codes.cuh"

namespace gradcomp::cuda {

// c = scale * gradient + decay * residual
class FromGradient {
  public:
    template <class Params>
    FromGradient(const Params& params, const Segment& segment)
        : segment_(segment),
          scale_(static_cast<float>(params.scale)),
          decay_(static_cast<float>(params.decay)) {}

    // Elements first..first+count, count <= 8; first is a multiple of eight.
    void read(std::int64_t first, std::int64_t count, float (&c)[8]) const {
        read_gradient(segment_, first, count, c);
#pragma unroll
        for (int i = 0; i < 8; ++i) c[i] = scale_ * c[i];
        if (segment_.residual == 0) return;
        float r[8] = {};
        read_floats(at<float>(segment_.residual) + first, count, r);
#pragma unroll
        for (int i = 0; i < 8; ++i) c[i] = c[i] + decay_ * r[i];
    }

    float one(std::int64_t i) const {
        const float c = scale_ * gradient_at(segment_, i);
        return segment_.residual == 0 ? c : c + decay_ * at<float>(segment_.residual)[i];
    }

  private:
    const Segment& segment_;
    float scale_, decay_;
};

// Values of one payload, elements first..first+count of a row.
template <class Class>
inline void read_values(const std::uint8_t* payload, const Segment& segment, const Level& level,
                        std::int64_t first, std::int64_t count, float (&values)[8]) {
    const Payload<Class> layout(segment);
    I32 code[8];
    read_codes<typename Class::Code>(payload + layout.scale_bytes, first, count, segment.bits, code);
    std::int64_t bucket = first / layout.bucket_size;
    std::int64_t end = (bucket + 1) * layout.bucket_size;
    Class codec(payload + bucket * Class::record_bytes, level);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i >= count) {
            values[i] = 0.0f;
            continue;
        }
        if (first + i >= end) {
            ++bucket;
            end += layout.bucket_size;
            codec = Class(payload + bucket * Class::record_bytes, level);
        }
        values[i] = codec.value(code[i]).v;
    }
}

// c = (value_0 + value_1 + ...) / divisor + decay * residual
template <class Class>
class FromPayloads {
  public:
    template <class Params>
    FromPayloads(const Params& params, const Segment& segment)
        : segment_(segment),
          level_(segment, at<float>(params.magnitudes)),
          payloads_(at<std::uint64_t>(params.payloads)),
          count_(params.payload_count),
          divisor_(static_cast<float>(params.divisor)),
          decay_(static_cast<float>(params.decay)) {}

    void read(std::int64_t first, std::int64_t count, float (&c)[8]) const {
        read_values<Class>(at<std::uint8_t>(payloads_[0]) + segment_.payload, segment_, level_, first, count,
                           c);
        for (std::int64_t sender = 1; sender < count_; ++sender) {
            float values[8];
            read_values<Class>(at<std::uint8_t>(payloads_[sender]) + segment_.payload, segment_, level_,
                               first, count, values);
#pragma unroll
            for (int i = 0; i < 8; ++i) c[i] = c[i] + values[i];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) c[i] = c[i] / divisor_;
        if (segment_.residual == 0) return;
        float r[8] = {};
        read_floats(at<float>(segment_.residual) + first, count, r);
#pragma unroll
        for (int i = 0; i < 8; ++i) c[i] = c[i] + decay_ * r[i];
    }

    float one(std::int64_t i) const {
        float c[8];
        const std::int64_t first = i - i % 8;
        read(first, smaller(group, segment_.length - first), c);
        float found = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (k == i % 8) found = c[k];
        return found;
    }

  private:
    const Segment& segment_;
    Level level_;
    const std::uint64_t* payloads_;
    std::int64_t count_;
    float divisor_, decay_;
};

}  // namespace gradcomp::cuda
