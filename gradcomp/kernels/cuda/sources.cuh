// The two sources of contributions: a rank's own gradient, and the mean of what the ranks sent.
#pragma once

#include "native/body/finish.hpp"

#include "codes.cuh"

namespace gradcomp::cuda {

// x + factor * y
inline float4 plus(const float4& x, float factor, const float4& y) {
    return make_float4(x.x + factor * y.x, x.y + factor * y.y, x.z + factor * y.z, x.w + factor * y.w);
}

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

    // What a stage holds of a bucket, from `begin` on, a multiple of eight; zero where less than that is
    // left. `whole`: of what the teams of the warp stage, all exists.
    void stage(std::int64_t, std::int64_t begin, int left, bool whole, const Stage& stage) const {
        // Once: what is written to the stage might have changed them.
        const std::uint64_t gradient = segment_.gradient, residual = segment_.residual;
        const Dtype dtype = segment_.dtype;
        const float* const r = residual == 0 ? nullptr : at<float>(residual) + begin;
        if (!whole || gradient == 0 || !is_vector(gradient, begin, dtype) || !aligned(r, 16)) {
            const int own = group * team_rank();
#pragma unroll 1
            for (int first = 0; first < held; first += strip) {
                float c[8];
                read(begin + first + own, count_of(left - first - own), c);
                stage.write(first, c);
            }
        } else if (dtype == Dtype::float32) {
            stage_vectors(at<float>(gradient) + begin, dtype, r, stage);
        } else {
            stage_vectors(at<std::uint16_t>(gradient) + begin, dtype, r, stage);
        }
    }

    // Prefetches elements that are read soon, by so many threads, each with its number.
    void fetch_ahead(std::int64_t, std::int64_t first, int count, int thread, int threads) const {
        const int size = size_of(segment_.dtype);
        if (segment_.gradient != 0)
            cuda::fetch_ahead(at<std::uint8_t>(segment_.gradient) + first * size, count * size, thread,
                              threads);
        if (segment_.residual != 0)
            cuda::fetch_ahead(at<float>(segment_.residual) + first, 4 * count, thread, threads);
    }

    float one(std::int64_t, std::int64_t i) const {
        const float c = scale_ * gradient_at(segment_, i);
        return segment_.residual == 0 ? c : c + decay_ * at<float>(segment_.residual)[i];
    }

  private:
    // As many loads at a time as registers hold.
    template <class T>
    void stage_vectors(const T* gradient, Dtype dtype, const float* residual, const Stage& stage) const {
        constexpr int at_once = vectors_of_stage / 2;
#pragma unroll 1
        for (int first = 0; first < vectors_of_stage; first += at_once) {
            decltype(load_four(gradient)) g[at_once];
            float4 r[at_once] = {};  // what begins as nothing takes no registers before
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                g[i] = load_four(gradient + 4 * place_of_vector(first + i));
                if (residual != nullptr) r[i] = load_four(residual + 4 * place_of_vector(first + i));
            }
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const float4 x = as_floats(g[i], dtype);
                float4 c = make_float4(scale_ * x.x, scale_ * x.y, scale_ * x.z, scale_ * x.w);
                if (residual != nullptr) c = plus(c, decay_, r[i]);
                *stage.vector(first + i) = c;
            }
        }
    }

    const Segment& segment_;
    float scale_, decay_;
};

// Add so many elements of a bucket, one by one, by a team; `most`: of the warp's two teams. A chunk without
// elements adds zero. `Trees`: for as many chunks as there may be.
template <class Trees = ChunkTrees, class Range, class Source>
inline void add_elements(Range& range, const Source& source, std::int64_t bucket, std::int64_t begin,
                         std::int64_t elements, std::int64_t most) {
    const bool several = most > chunk_elements;
    Trees trees;
    for (std::int64_t chunk = 0; chunk < most; chunk += chunk_elements) {
        for (std::int64_t i = chunk + team_rank(); i < smaller(chunk + chunk_elements, elements);
             i += team_threads)
            range.add({source.one(bucket, begin + i)});
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
          divisor_(static_cast<float>(params.divisor)),
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
        Finish(divisor_, 1.0f)(c);
        if (segment_.residual == 0) return;
        float r[8] = {};
        read_floats(at<float>(segment_.residual) + first, count, r);
#pragma unroll
        for (int i = 0; i < 8; ++i) c[i] = c[i] + decay_ * r[i];
    }

    // See FromGradient.
    void stage(std::int64_t bucket, std::int64_t begin, int left, bool whole, const Stage& stage) const {
        const int own = group * team_rank();
        const std::int64_t origin = layout_.scale_bytes + place_of_codes<Code>(begin + own, segment_.bits);
#pragma unroll 1
        for (int first = 0; first < held; first += strip) {
            float c[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) c[i] = -0.0f;  // to which anything is added as it is
            // What the next sender has sent is on its way while one is added.
            Record<Class> next_record = {};
            Packed<Code> next_codes = {};
#pragma unroll 1
            for (std::int64_t sender = 0; sender <= count_; ++sender) {
                const Record<Class> record = next_record;
                const Packed<Code> codes = next_codes;
                if (sender < count_) {
                    const std::uint8_t* const payload = from(sender);
                    next_record.read(payload, bucket);
                    next_codes.read(payload + origin + place_of_codes<Code>(first, segment_.bits),
                                    count_of(left - first - own), segment_.bits);
                }
                if (sender == 0) continue;
                const Class codec = record.codec(level_);
                I32 code[8];
                codes.unpack(segment_.bits, code);
#pragma unroll
                for (int i = 0; i < 8; ++i) c[i] = c[i] + codec.value(code[i]).v;
            }
            stage.write(first, c);
        }
        finish(begin, left, whole, stage);
    }

    // See FromGradient. `bucket`: of the first of them.
    void fetch_ahead(std::int64_t bucket, std::int64_t first, int count, int thread, int threads) const {
        if (count <= 0) return;
        for (std::int64_t sender = 0; sender < count_; ++sender) {
            const std::uint8_t* const payload = from(sender);
            cuda::fetch_ahead(payload + layout_.scale_bytes + place_of_codes<Code>(first, segment_.bits),
                              bytes_of<Code>(count, segment_.bits), thread, threads);
            if (thread == 0 && Class::record_bytes > 0) prefetch_l2(payload + place_of_record<Class>(bucket));
        }
        if (segment_.residual != 0)
            cuda::fetch_ahead(at<float>(segment_.residual) + first, 4 * count, thread, threads);
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
        c = Finish(divisor_, 1.0f)(F32{c}).v;
        return segment_.residual == 0 ? c : c + decay_ * at<float>(segment_.residual)[i];
    }

  private:
    // From sums to contributions.
    void finish(std::int64_t begin, int left, bool whole, const Stage& stage) const {
        const Finish mean(divisor_, 1.0f);
        const float* const residual = segment_.residual == 0 ? nullptr : at<float>(segment_.residual) + begin;
        if (!whole || !aligned(residual, 16)) {
#pragma unroll 1
            for (int first = 0; first < held; first += strip) {
                const int place = first + group * team_rank();
                float c[8], r[8] = {};
                stage.read(first, c);
                if (residual != nullptr) read_floats(residual + place, count_of(left - place), r);
                mean(c);
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (residual != nullptr) c[i] = c[i] + decay_ * r[i];
                stage.write(first, c);
            }
            return;
        }
        __syncwarp();
        constexpr int at_once = vectors_of_stage / 2;
#pragma unroll 1
        for (int first = 0; first < vectors_of_stage; first += at_once) {
            float4 r[at_once] = {};
            if (residual != nullptr)
#pragma unroll
                for (int i = 0; i < at_once; ++i)
                    r[i] = __ldcs(reinterpret_cast<const float4*>(residual) + place_of_vector(first + i));
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                float4* const own = stage.vector(first + i);
                float c[4] = {own->x, own->y, own->z, own->w};
                mean(c);
                const float4 found = make_float4(c[0], c[1], c[2], c[3]);
                *own = residual == nullptr ? found : plus(found, decay_, r[i]);
            }
        }
    }

    const std::uint8_t* from(std::int64_t sender) const {
        return at<std::uint8_t>(payloads_[sender]) + segment_.payload;
    }

    const Segment& segment_;
    Payload<Class> layout_;
    Level level_;
    const std::uint64_t* payloads_;
    std::int64_t count_;
    float divisor_, decay_;
};

}  // namespace gradcomp::cuda
