// Contributions to payload and shadow: one pass over a bucket for its range, one for its codes, the second in
// cache.
#pragma once

#include "codecs.hpp"
#include "codes.hpp"
#include "philox.hpp"

namespace gradcomp::GRADCOMP_BODY {

// Where the contributions c of a segment come from.
class Source {
  public:
    // c of the elements first..first+count, at most a block: in `scratch`, or where they lie in memory if
    // that holds whole vectors. The scratch has room for whole vectors.
    virtual const float* block(std::int64_t first, std::int64_t count, float* scratch) const = 0;

  protected:
    ~Source() = default;
};

struct EncodeJob {
    const Segment& segment;
    const Source& source;
    const Rounding& rounding;
    std::uint8_t* scales;
    std::uint8_t* codes;
    bool streaming;
};

enum class Shadow { none, cached, streamed };

// Codes, and shadow, of one block.
template <class Codec, bool stochastic, Shadow kind>
void encode_block(const Codec& codec, const float* c, const std::uint16_t* draws, std::int64_t count,
                  typename Codec::Code* codes, float* shadow) {
    const auto encode_vector = [&](std::int64_t i, float* shadow_at) {
        const F32 contribution = load(c + i);
        F32 u = splat(0.0f);
        if constexpr (stochastic) u = to_float(load_widen(draws + i)) * splat(0x1p-16f);
        const I32 code = codec.template code<stochastic>(contribution, u);
        store_narrow(codes + i, code);
        if constexpr (kind == Shadow::cached) store(shadow_at, contribution - codec.value(code));
        if constexpr (kind == Shadow::streamed) stream(shadow_at, contribution - codec.value(code));
    };
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes) encode_vector(i, kind == Shadow::none ? nullptr : shadow + i);
    if (i < count) {
        alignas(64) float rest[lanes];
        encode_vector(i, rest);
        if constexpr (kind != Shadow::none)
            std::memcpy(shadow + i, rest, static_cast<std::size_t>(count - i) * sizeof(float));
    }
}

// Encode a segment; false, with the payload in any state, if it is non-finite.
template <class Codec, bool stochastic>
bool encode_segment(const EncodeJob& job) {
    const Segment& segment = job.segment;
    const int bits = segment.bits;
    const std::int64_t bucket_size = Codec::record_bytes > 0 ? segment.bucket_size : block_size;

    alignas(64) float scratch[block_size];
    alignas(64) std::uint16_t draw_buffer[block_size + RandomStream::slack];
    const RandomStream random(job.rounding, segment.layer);
    CodeWriter<typename Codec::Code> writer(job.codes, segment.length, bits);
    std::uint8_t* record = job.scales;

    const auto contributions = [&](std::int64_t first, std::int64_t count) {
        const float* c = job.source.block(first, count, scratch);
        for (std::int64_t i = count; i < whole_vectors(count); ++i)
            scratch[i] = Codec::Range::padding(scratch);
        return c;
    };

    for (std::int64_t bucket = 0; bucket < segment.length; bucket += bucket_size) {
        const std::int64_t end = smaller(bucket + bucket_size, segment.length);
        const float* c = nullptr;

        typename Codec::Range range;
        for (std::int64_t first = bucket; first < end; first += block_size) {
            const std::int64_t count = smaller(block_size, end - first);
            c = contributions(first, count);
            for (std::int64_t i = 0; i < count; i += lanes) range.add(load(c + i));
        }

        const Codec codec(range, bits);
        if (!codec.representable()) return false;
        codec.write(record);
        record += Codec::record_bytes;

        for (std::int64_t first = bucket; first < end; first += block_size) {
            const std::int64_t count = smaller(block_size, end - first);
            if (end - bucket > block_size) c = contributions(first, count);
            const std::uint16_t* draws = nullptr;
            if constexpr (stochastic) draws = random.draw(segment.start + first, count, draw_buffer);
            const auto encode = [&]<Shadow kind>(float* shadow) {
                encode_block<Codec, stochastic, kind>(codec, c, draws, count, writer.room(), shadow);
            };
            if (segment.shadow == 0) {
                encode.template operator()<Shadow::none>(nullptr);
            } else {
                auto* const shadow = reinterpret_cast<float*>(segment.shadow) + first;
                if (job.streaming && aligned_for_stream(shadow))
                    encode.template operator()<Shadow::streamed>(shadow);
                else
                    encode.template operator()<Shadow::cached>(shadow);
            }
            writer.append(count);
        }
    }
    writer.finish();
    return true;
}

}  // namespace gradcomp::GRADCOMP_BODY
