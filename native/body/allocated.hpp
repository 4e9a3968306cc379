// Codes of segments whose buckets have bits of their own: two passes over a segment, one for the ranges of
// all its buckets, one for their codes.
#pragma once

#include <span>
#include <vector>

#include "allocate.hpp"
#include "decode.hpp"
#include "encode.hpp"
#include "sources.hpp"

namespace gradcomp::GRADCOMP_BODY {

inline std::int64_t bucket_count(const Segment& segment) {
    return (segment.length + segment.bucket_size - 1) / segment.bucket_size;
}

// MinMax under another name: encode_block has one caller for each codec, and is inlined there. With two
// callers it is not, and MinMax with a residual takes 1.15 times as long.
class BucketMinMax : public MinMax {
  public:
    using MinMax::MinMax;
};

template <bool stochastic>
class AllocatedEncoder {
  public:
    AllocatedEncoder(Codec codec, const Segment& segment, const Source& source, const Rounding& rounding,
                     std::uint8_t* payload)
        : segment_(segment),
          source_(source),
          random_(rounding, segment.layer),
          offset_(splat(draw_offset(rounding.step))),
          codec_(codec),
          streaming_(segment.length >= streaming_length),
          records_(payload),
          bits_(payload + 8 * bucket_count(segment)) {}

    // False, with the payload in any state, if the segment is non-finite.
    bool run(std::int64_t room) {
        if (!find_ranges()) return false;
        std::uint8_t* codes = bits_ + bucket_count(segment_);
        std::uint8_t* const end = records_ + room;
        std::int64_t bucket = 0;
        for (std::int64_t begin = 0; begin < segment_.length; begin += segment_.bucket_size, ++bucket)
            codes = encode(bucket, begin, codes);
        std::memset(codes, 0, static_cast<std::size_t>(end - codes));
        return true;
    }

  private:
    std::int64_t end_of(std::int64_t begin) const {
        return smaller(begin + segment_.bucket_size, segment_.length);
    }

    const float* contributions(std::int64_t first, std::int64_t count) {
        const float* c = source_.block(first, count, scratch_);
        for (std::int64_t i = count; i < whole_vectors(count); ++i) scratch_[i] = scratch_[0];
        return c;
    }

    // Lowest value and range of every bucket, to where the records will be; then all bits.
    bool find_ranges() {
        float largest = 0.0f;
        std::uint8_t* record = records_;
        for (std::int64_t begin = 0; begin < segment_.length; begin += segment_.bucket_size, record += 8) {
            MinMax::Range range;
            const std::int64_t end = end_of(begin);
            for (std::int64_t first = begin; first < end; first += block_size) {
                const std::int64_t count = smaller(block_size, end - first);
                const float* const c = contributions(first, count);
                for (std::int64_t i = 0; i < count; i += lanes) range.add(load(c + i));
            }
            const float low = range.low(), span = range.high() - low;
            if (!range.finite() || !is_finite(span)) return false;
            write_float(record, low);
            write_float(record + 4, span);
            largest = span > largest ? span : largest;
        }
        if (is_flat(largest)) {
            std::memset(bits_, 0, static_cast<std::size_t>(bucket_count(segment_)));
            return true;
        }
        std::memset(&histogram_, 0, sizeof histogram_);
        histogram_.largest = class_of(largest);
        std::int64_t bucket = 0;
        for (std::int64_t begin = 0; begin < segment_.length; begin += segment_.bucket_size, ++bucket)
            add(span(bucket), groups_of(end_of(begin) - begin));
        Allocation allocation;
        allocation.choose(codec_, segment_.bits, histogram_);
        const std::int64_t buckets = bucket_count(segment_);
        for (std::int64_t k = 0; k < buckets; ++k)
            bits_[k] = static_cast<std::uint8_t>(
                bits_of_bucket(histogram_, allocation.shift(), allocation.uniform(), segment_.bits, span(k)));
        return true;
    }

    // Flat ones count for what there is to share only.
    void add(float span, std::int64_t groups) {
        histogram_.groups += groups;
        if (is_flat(span)) return;
        const int at = histogram_.depth(span);
        histogram_.weights[at] += Histogram::weight(span, groups);
        histogram_.counts[at] += groups;
        histogram_.varying += groups;
    }

    float span(std::int64_t bucket) const { return read_float(records_ + 8 * bucket + 4); }

    // Returns where the next bucket's codes begin.
    std::uint8_t* encode(std::int64_t bucket, std::int64_t begin, std::uint8_t* codes) {
        const int bits = bits_[bucket];
        const BucketMinMax codec(read_float(records_ + 8 * bucket), span(bucket), bits);
        codec.write(records_ + 8 * bucket);
        const std::int64_t end = end_of(begin);
        if (bits == 0) {
            if (segment_.next_residual != 0) {
                for (std::int64_t first = begin; first < end; first += block_size)
                    encode_part(codec, first, smaller(block_size, end - first), unused_.codes);
            }
            return codes;
        }
        const std::int64_t padded = 8 * groups_of(end - begin);
        CodeWriter<MinMax::Code> writer(codes, padded, bits);
        for (std::int64_t first = begin; first < end; first += block_size) {
            const std::int64_t count = smaller(block_size, end - first);
            encode_part(codec, first, count, writer.room(count));
            writer.append(count);
        }
        writer.finish();
        return codes + padded / 8 * bits;
    }

    void encode_part(const BucketMinMax& codec, std::int64_t first, std::int64_t count, std::uint8_t* codes) {
        const float* const c = contributions(first, count);
        const Prefetcher prefetcher(c, c != scratch_);
        Draws draws{nullptr, offset_};
        if constexpr (stochastic) draws.lanes = random_.draw(segment_.start + first, count, draws_);
        if (segment_.next_residual == 0) {
            encode_block<BucketMinMax, stochastic, NextResidual::none>(codec, c, draws, count, codes, nullptr,
                                                                       prefetcher);
            return;
        }
        auto* const next_residual = reinterpret_cast<float*>(segment_.next_residual) + first;
        if (streaming_ && aligned_for_stream(next_residual))
            encode_block<BucketMinMax, stochastic, NextResidual::streamed>(codec, c, draws, count, codes,
                                                                           next_residual, prefetcher);
        else
            encode_block<BucketMinMax, stochastic, NextResidual::cached>(codec, c, draws, count, codes,
                                                                         next_residual, prefetcher);
    }

    const Segment& segment_;
    const Source& source_;
    RandomStream random_;
    F32 offset_;
    Codec codec_;
    Histogram histogram_;
    bool streaming_;
    std::uint8_t* records_;
    std::uint8_t* bits_;
    CodeBuffer<MinMax::Code> unused_;
    alignas(64) float scratch_[block_capacity];
    alignas(64) std::uint16_t draws_[block_size + RandomStream::slack];
};

// Values of a segment, from its first element on.
class AllocatedReader {
  public:
    AllocatedReader(const Segment& segment, const std::uint8_t* payload)
        : segment_(&segment),
          records_(payload),
          bits_(payload + 8 * bucket_count(segment)),
          codes_(bits_ + bucket_count(segment)),
          possible_(used_bytes(segment, payload) >= 0) {}

    // Whether the payload can be what it says of itself; else all values are NaN.
    bool possible() const { return possible_; }

    // Elements first..first+count, at most a block, into an array of block_capacity. No element before them
    // can be read any more.
    void read(std::int64_t first, std::int64_t count, float* values) {
        if (!possible_) {
            for (std::int64_t i = 0; i < count; ++i) values[i] = __builtin_nanf("");
            return;
        }
        CodeBuffer<MinMax::Code> buffer;
        for (std::int64_t begin = 0; begin < count;) {
            while (first + begin >= begin_ + segment_->bucket_size) next();
            const std::int64_t end = smaller(begin_ + segment_->bucket_size - first, count);
            const MinMax codec(records_ + 8 * bucket_, Level(bits_[bucket_]));
            const std::uint8_t* const codes = unpacked(first + begin - begin_, end - begin, buffer);
            // The last vector may reach into the next bucket, which comes after and overwrites it.
            for (std::int64_t i = 0; i < end - begin; i += lanes)
                store(values + begin + i, codec.value(load_widen(codes + i)));
            begin = end;
        }
    }

    // Whether a code of some bucket, occurring or not, finishes as something that is not finite.
    bool overflows(const Finish& finish) const {
        if (!possible_) return true;
        bool any = false;
        for (std::int64_t bucket = 0; bucket < bucket_count(*segment_); ++bucket) {
            const MinMax codec(records_ + 8 * bucket, Level(bits_[bucket]));
            for (const float bound : codec.bounds)
                any |= GRADCOMP_BODY::overflows(finish(bound), segment_->dtype);
        }
        return any;
    }

  private:
    void next() {
        codes_ += (segment_->bucket_size + 7) / 8 * std::int64_t{bits_[bucket_]};
        begin_ += segment_->bucket_size;
        ++bucket_;
    }

    const std::uint8_t* unpacked(std::int64_t from, std::int64_t count, CodeBuffer<MinMax::Code>& buffer) {
        const int bits = bits_[bucket_];
        const std::int64_t skipped = from % 8, groups = (skipped + count + 7) / 8;
        if (bits == 0) {
            std::memset(buffer.codes, 0, sizeof buffer.codes);
            return buffer.codes;
        }
        const std::uint8_t* const begin = codes_ + from / 8 * bits;
        std::memset(buffer.codes + 8 * (groups - 1), 0, 8 + lanes);
        unpackers[bits - 1](begin, begin + groups * bits, groups, buffer.codes);
        return buffer.codes + skipped;
    }

    const Segment* segment_;
    const std::uint8_t* records_;
    const std::uint8_t* bits_;
    const std::uint8_t* codes_;
    std::int64_t bucket_ = 0, begin_ = 0;
    bool possible_;
};

// c = (value_0 + value_1 + ...) / divisor + decay * residual, of blocks in order.
class MeanOfAllocated final : public Source {
  public:
    MeanOfAllocated(const Segment& segment, std::span<const std::uint8_t* const> payloads, float divisor,
                    float decay)
        : segment_(segment), divisor_(splat(divisor)), decay_(splat(decay)) {
        for (const std::uint8_t* const payload : payloads)
            readers_.emplace_back(segment, payload + segment.payload);
    }

    const float* block(std::int64_t first, std::int64_t count, float* scratch) const override {
        readers_[0].read(first, count, scratch);
        for (std::size_t k = 1; k < readers_.size(); ++k) {
            alignas(64) float values[block_capacity];
            readers_[k].read(first, count, values);
            for (std::int64_t i = 0; i < count; i += lanes)
                store(scratch + i, load(scratch + i) + load(values + i));
        }
        for (std::int64_t i = 0; i < count; i += lanes) store(scratch + i, load(scratch + i) / divisor_);
        if (segment_.residual == 0) return scratch;
        const auto* r = reinterpret_cast<const std::uint32_t*>(segment_.residual) + first;
        for (std::int64_t i = 0; i < count; i += lanes)
            store(scratch + i, load(scratch + i) + decay_ * as_float(load_part(r + i, count - i)));
        return scratch;
    }

  private:
    const Segment& segment_;
    F32 divisor_, decay_;
    mutable std::vector<AllocatedReader> readers_;
};

inline bool encode_allocated(Codec codec, const Segment& segment, const Source& source,
                             const Rounding& rounding, std::uint8_t* payload) {
    const std::int64_t room = wire_bytes(codec, segment);
    if (rounding.stochastic)
        return AllocatedEncoder<true>(codec, segment, source, rounding, payload).run(room);
    return AllocatedEncoder<false>(codec, segment, source, rounding, payload).run(room);
}

// Decode to the output, or add to it; returns whether something is not finite there.
inline bool decode_allocated(const Segment& segment, const std::uint8_t* payload, const Finish& finish,
                             bool added) {
    AllocatedReader reader(segment, payload);
    write_blocks(segment, finish, added, [&](std::int64_t first, std::int64_t count, float* values) {
        reader.read(first, count, values);
    });
    return reader.overflows(finish);
}

}  // namespace gradcomp::GRADCOMP_BODY
