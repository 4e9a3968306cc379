// The two sources of contributions: a rank's own gradient, and the mean of what the ranks sent.
#pragma once

#include "native/body/finish.hpp"

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

    // Strips from `begin` on, a multiple of eight, of a bucket; zero where less than that is left.
    template <int strips>
    void read_strips(std::int64_t, std::int64_t begin, int left, float (&c)[strips][8]) const {
        const float* const gradient = at<float>(segment_.gradient) + begin;
        const float* const residual = at<float>(segment_.residual) + begin;
        const bool vectors = segment_.dtype == Dtype::float32 && segment_.gradient != 0 &&
                             aligned(gradient, 16) && (segment_.residual == 0 || aligned(residual, 16));
        if (left < strips * strip || !vectors) {
#pragma unroll
            for (int k = 0; k < strips; ++k) {
                const int place = k * strip + place_in_strip();
                read(begin + place, count_of(left - place), c[k]);
            }
            return;
        }
        // All loads before the first value is used.
#pragma unroll
        for (int k = 0; k < strips; ++k) load_vectors(gradient + k * strip, c[k]);
        if (segment_.residual == 0) {
#pragma unroll
            for (int k = 0; k < strips; ++k)
#pragma unroll
                for (int i = 0; i < 8; ++i) c[k][i] = scale_ * c[k][i];
        } else {
            // Strip by strip: registers for all of it would keep other blocks away.
#pragma unroll
            for (int k = 0; k < strips; ++k) {
                float r[8];
                load_vectors(residual + k * strip, r);
#pragma unroll
                for (int i = 0; i < 8; ++i) c[k][i] = scale_ * c[k][i] + decay_ * r[i];
            }
        }
#pragma unroll
        for (int k = 0; k < strips; ++k) swap_vectors(c[k]);
    }

    float one(std::int64_t, std::int64_t i) const {
        const float c = scale_ * gradient_at(segment_, i);
        return segment_.residual == 0 ? c : c + decay_ * at<float>(segment_.residual)[i];
    }

  private:
    const Segment& segment_;
    float scale_, decay_;
};

// Add the elements begin..end of a bucket, one by one, by half a warp. `Trees`: for as many chunks as there
// may be.
template <class Trees = ChunkTrees, class Range, class Source>
inline void add_elements(Range& range, const Source& source, std::int64_t bucket, std::int64_t begin,
                         std::int64_t end) {
    const bool several = end - begin > chunk_elements;
    Trees trees;
    for (std::int64_t chunk = begin; chunk < end; chunk += chunk_elements) {
        for (std::int64_t i = chunk + team_rank(); i < smaller(chunk + chunk_elements, end); i += 16)
            range.add({source.one(bucket, i)});
        if (several) range.end_chunk(trees);
    }
    if (several) range.join(trees);
}

// Codec and bucket that some elements of a payload belong to: few of those that follow need another.
template <class Class>
class Reader {
  public:
    Reader(const std::uint8_t* payload, const Payload<Class>& layout, const Level& level, std::int64_t first)
        : payload_(payload),
          size_(layout.bucket_size),
          level_(level),
          bucket_(first / size_),
          end_((bucket_ + 1) * size_),
          codec_(codec_of<Class>(payload, bucket_, level)) {}

    // Values of elements first..first+count, count <= 8, none of them before those of an earlier call.
    // `enter` sees each further codec.
    template <class Enter>
    void read(const Packed<typename Class::Code>& packed, std::int64_t first, int count, float (&values)[8],
              Enter enter) {
        I32 code[8];
        packed.unpack(level_.bits, code);
        // Once, but where buckets end in between.
        for (std::int64_t next = first; next == first || next < first + count; next = end_) {
            if (next >= end_) {
                bucket_ = next / size_;
                end_ = (bucket_ + 1) * size_;
                codec_ = codec_of<Class>(payload_, bucket_, level_);
                enter(codec_);
            }
            const auto begin = static_cast<int>(next - first);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i >= begin) values[i] = codec_.value(code[i]).v;
        }
    }

    const Class& codec() const { return codec_; }

  private:
    const std::uint8_t* payload_;
    std::int64_t size_;
    const Level& level_;
    std::int64_t bucket_, end_;
    Class codec_;
};

// c = (value_0 + value_1 + ...) / divisor + decay * residual
template <class Class>
class FromPayloads {
  public:
    using Code = Class::Code;

    template <class Params>
    FromPayloads(const Params& params, const Segment& segment)
        : segment_(segment),
          layout_(segment),
          level_(segment, at<float>(params.magnitudes)),
          payloads_(at<std::uint64_t>(params.payloads)),
          count_(params.payload_count),
          mean_(static_cast<float>(params.divisor), 1.0f),
          decay_(static_cast<float>(params.decay)) {}

    void read(std::int64_t first, std::int64_t count, float (&c)[8]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) c[i] = -0.0f;
        for (std::int64_t sender = 0; sender < count_; ++sender) {
            const std::uint8_t* const payload = from(sender);
            Packed<Code> packed;
            packed.read(payload + layout_.scale_bytes + place_of_codes<Code>(first, segment_.bits),
                        static_cast<int>(count), segment_.bits);
            Reader<Class> reader(payload, layout_, level_, first);
            float values[8];
            reader.read(packed, first, static_cast<int>(count), values, [](const Class&) {});
#pragma unroll
            for (int i = 0; i < 8; ++i) c[i] = c[i] + values[i];
        }
        mean_(c);
        if (segment_.residual == 0) return;
        float r[8] = {};
        read_floats(at<float>(segment_.residual) + first, count, r);
#pragma unroll
        for (int i = 0; i < 8; ++i) c[i] = c[i] + decay_ * r[i];
    }

    template <int strips>
    void read_strips(std::int64_t bucket, std::int64_t begin, int left, float (&c)[strips][8]) const {
        // As many at once as registers hold beside the sums.
        constexpr int at_once = sizeof(Code) == 1 ? strips : 1;
        const std::int64_t origin = place_of_codes<Code>(begin + place_in_strip(), segment_.bits);
#pragma unroll
        for (int k = 0; k < strips; ++k)
#pragma unroll
            for (int i = 0; i < 8; ++i) c[k][i] = -0.0f;  // to which anything is added as it is
        for (std::int64_t sender = 0; sender < count_; ++sender) {
            const std::uint8_t* const payload = from(sender);
            const std::uint8_t* const codes = payload + layout_.scale_bytes + origin;
            const Class codec = codec_of<Class>(payload, bucket, level_);
#pragma unroll
            for (int first = 0; first < strips; first += at_once) {
                Packed<Code> packed[at_once];
#pragma unroll
                for (int k = 0; k < at_once; ++k)
                    packed[k].read(codes + place_of_codes<Code>((first + k) * strip, segment_.bits),
                                   count_of(left - (first + k) * strip - place_in_strip()), segment_.bits);
#pragma unroll
                for (int k = 0; k < at_once; ++k) {
                    I32 code[8];
                    packed[k].unpack(segment_.bits, code);
#pragma unroll
                    for (int i = 0; i < 8; ++i) c[first + k][i] = c[first + k][i] + codec.value(code[i]).v;
                }
            }
        }
#pragma unroll
        for (int k = 0; k < strips; ++k) mean_(c[k]);
        if (segment_.residual == 0) return;
        const float* const residual = at<float>(segment_.residual) + begin;
#pragma unroll
        for (int k = 0; k < strips; ++k) {
            float r[8] = {};
            read_strip(residual + k * strip, left - k * strip, r);
#pragma unroll
            for (int i = 0; i < 8; ++i) c[k][i] = c[k][i] + decay_ * r[i];
        }
    }

    // An element of a bucket.
    float one(std::int64_t bucket, std::int64_t i) const {
        float c = 0.0f;
        for (std::int64_t sender = 0; sender < count_; ++sender) {
            const Class codec = codec_of<Class>(from(sender), bucket, level_);
            const float value =
                codec.value(read_code<Code>(from(sender) + layout_.scale_bytes, i, segment_.bits)).v;
            c = sender == 0 ? value : c + value;
        }
        c = mean_(F32{c}).v;
        return segment_.residual == 0 ? c : c + decay_ * at<float>(segment_.residual)[i];
    }

  private:
    const std::uint8_t* from(std::int64_t sender) const {
        return at<std::uint8_t>(payloads_[sender]) + segment_.payload;
    }

    const Segment& segment_;
    Payload<Class> layout_;
    Level level_;
    const std::uint64_t* payloads_;
    std::int64_t count_;
    Finish mean_;
    float decay_;
};

}  // namespace gradcomp::cuda
