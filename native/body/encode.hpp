// Contributions to payload and next residual: one pass over a bucket for its range, one for its codes, the
// second in cache.
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
    Level level;
    std::uint8_t* scales;
    std::uint8_t* codes;
    bool streaming;
};

// Fetches contributions that lie in memory while codes are computed, when memory would otherwise idle.
class Prefetcher {
  public:
    // What comes after c in memory; or, for a c in scratch, nothing but c itself, again and again.
    Prefetcher(const float* c, bool in_memory)
        : address_(reinterpret_cast<std::uintptr_t>(c) + (in_memory ? distance_bytes : 0)),
          stride_(in_memory ? sizeof(float) : 0) {}

    // What comes after element i of the same contributions.
    Prefetcher from(std::int64_t i) const {
        Prefetcher found = *this;
        found.address_ += static_cast<std::uintptr_t>(i) * stride_;
        return found;
    }

    void fetch(std::int64_t i) const { prefetch(address_ + static_cast<std::uintptr_t>(i) * stride_); }

  private:
    // Less, and the hardware's own prefetching has been there already; much more, and the first-level cache
    // overflows.
    static constexpr std::uintptr_t distance_bytes = 12 << 10;

    std::uintptr_t address_;
    std::uintptr_t stride_;
};

enum class NextResidual { none, cached, streamed };

// The random numbers of a block: (lane + offset) / 2**16.
struct Draws {
    const std::uint16_t* lanes;
    F32 offset;
};

// Codes, and next residual, of one block.
template <class Codec, bool stochastic, NextResidual kind>
void encode_block(const Codec codec, const float* c, const Draws draws, std::int64_t count,
                  typename Codec::Code* codes, float* next_residual, const Prefetcher prefetcher) {
    const auto encode_vector = [&](std::int64_t i, float* next_residual_at) {
        prefetcher.fetch(i);
        const F32 contribution = load(c + i);
        F32 u = splat(0.0f);
        if constexpr (stochastic)
            u = (to_float(load_widen(draws.lanes + i)) + draws.offset) * splat(0x1p-16f);
        const I32 code = codec.template code<stochastic>(contribution, u);
        store_narrow(codes + i, code);
        if constexpr (kind == NextResidual::cached) store(next_residual_at, contribution - codec.value(code));
        if constexpr (kind == NextResidual::streamed)
            stream(next_residual_at, contribution - codec.value(code));
    };
    std::int64_t i = 0;
    for (; i + lanes <= count; i += lanes)
        encode_vector(i, kind == NextResidual::none ? nullptr : next_residual + i);
    if (i < count) {
        alignas(64) float rest[lanes];
        encode_vector(i, rest);
        if constexpr (kind != NextResidual::none)
            std::memcpy(next_residual + i, rest, static_cast<std::size_t>(count - i) * sizeof(float));
    }
}

// The same of a small bucket of whole vectors, inlined: with a call for each, encoding takes twice as long.
// The loop stands twice because every way to share it that was tried made other codecs take 1.1 to 1.9 times
// as long.
template <class Codec, bool stochastic, NextResidual kind>
[[gnu::always_inline]] inline void encode_whole_vectors(const Codec codec, const float* c, const Draws draws,
                                                        std::int64_t count, typename Codec::Code* codes,
                                                        float* next_residual, const Prefetcher prefetcher) {
    const auto encode_vector = [&](std::int64_t i, float* next_residual_at) {
        prefetcher.fetch(i);
        const F32 contribution = load(c + i);
        F32 u = splat(0.0f);
        if constexpr (stochastic)
            u = (to_float(load_widen(draws.lanes + i)) + draws.offset) * splat(0x1p-16f);
        const I32 code = codec.template code<stochastic>(contribution, u);
        store_narrow(codes + i, code);
        if constexpr (kind == NextResidual::cached) store(next_residual_at, contribution - codec.value(code));
        if constexpr (kind == NextResidual::streamed)
            stream(next_residual_at, contribution - codec.value(code));
    };
    for (std::int64_t i = 0; i < count; i += lanes)
        encode_vector(i, kind == NextResidual::none ? nullptr : next_residual + i);
}

// Whether a codec's buckets are mostly small, so that several are looked at together.
template <class Codec>
concept OfSmallBuckets = requires { Codec::small_buckets; };

// A bucket after the first pass over it.
template <class Codec>
struct ScannedBucket {
    std::int64_t begin, end;
    typename Codec::Range range;
    const float* c;  // of its last block
};

// Encodes the segment of a job, bucket by bucket.
template <class Codec, bool stochastic>
class SegmentEncoder {
  public:
    explicit SegmentEncoder(const EncodeJob& job)
        : job_(job),
          bucket_size_(Codec::record_bytes > 0 ? job.segment.bucket_size : block_size),
          random_(job.rounding, job.segment.layer),
          offset_(splat(draw_offset(job.rounding.step))),
          writer_(job.codes, job.segment.length, job.segment.bits) {}

    // False, with the payload in any state, if the segment is non-finite.
    bool run() {
        const std::int64_t length = job_.segment.length;
        std::uint8_t* record = job_.scales;
        std::int64_t done = 0;
        if constexpr (OfSmallBuckets<Codec>) done = encode_windows(record);
        if (done < 0) return false;
        if (done == length) {
            writer_.finish();
            return true;
        }
        // One bucket is scanned ahead: the reduction of its range to one number is a long chain of dependent
        // instructions, and the next scan has work to do meanwhile.
        float* scratch = scratch_[0];
        float* next_scratch = scratch_[1];
        ScannedBucket<Codec> next = scan(done, scratch);
        for (std::int64_t begin = done; begin < length; begin += bucket_size_) {
            const ScannedBucket<Codec> bucket = next;
            const Codec codec(bucket.range, job_.level, bucket.end - bucket.begin);
            if (bucket.end < length) next = scan(bucket.end, next_scratch);
            if (!codec.representable()) return false;
            codec.write(record);
            record += Codec::record_bytes;
            encode(codec, bucket, scratch);
            float* const used = scratch;
            scratch = next_scratch;
            next_scratch = used;
        }
        writer_.finish();
        return true;
    }

  private:
    // Small buckets of whole vectors: contributions, draws and codes of several at a time. Returns where the
    // first bucket that is left begins; less than 0 if one is not finite.
    [[gnu::noinline]] std::int64_t encode_windows(std::uint8_t*& record) {
        if (bucket_size_ > window_size / 2 || bucket_size_ % lanes != 0) return 0;
        // Draws and residuals together were slower by a quarter.
        if (stochastic && job_.segment.next_residual != 0) return 0;
        const std::int64_t count = window_size / bucket_size_ * bucket_size_;
        std::int64_t first = 0;
        for (; first + count <= job_.segment.length; first += count) {
            const float* const c = contributions(first, count, scratch_[0]);
            const Prefetcher prefetcher(c, c != scratch_[0]);
            Draws draws{nullptr, offset_};
            if constexpr (stochastic) draws.lanes = draws_of(first, count);
            typename Codec::Code* const codes = writer_.room(count);
            // One bucket ahead, as in run().
            Codec next = codec_of(c);
            for (std::int64_t at = 0; at < count; at += bucket_size_) {
                const Codec codec = next;
                if (at + bucket_size_ < count) next = codec_of(c + at + bucket_size_);
                if (!codec.representable()) return -1;
                codec.write(record);
                record += Codec::record_bytes;
                encode_small(codec, c + at, draws, first, at, codes + at, prefetcher.from(at));
            }
            writer_.append(count);
        }
        return first;
    }

    // Of a small bucket of whole vectors.
    Codec codec_of(const float* c) const {
        typename Codec::Range range;
        for (std::int64_t i = 0; i < bucket_size_; i += lanes) range.add(load(c + i));
        return Codec(range, job_.level, bucket_size_);
    }

    const float* contributions(std::int64_t first, std::int64_t count, float* scratch) const {
        const float* c = job_.source.block(first, count, scratch);
        for (std::int64_t i = count; i < whole_vectors(count); ++i)
            scratch[i] = Codec::Range::padding(scratch);
        return c;
    }

    ScannedBucket<Codec> scan(std::int64_t begin, float* scratch) const {
        ScannedBucket<Codec> bucket{begin, smaller(begin + bucket_size_, job_.segment.length), {}, nullptr};
        static_assert(chunk_elements % block_size == 0);
        ChunkTrees trees;
        for (std::int64_t first = begin; first < bucket.end; first += block_size) {
            const std::int64_t count = smaller(block_size, bucket.end - first);
            if (first > begin && (first - begin) % chunk_elements == 0) bucket.range.end_chunk(trees);
            bucket.c = contributions(first, count, scratch);
            for (std::int64_t i = 0; i < count; i += lanes) bucket.range.add(load(bucket.c + i));
        }
        if (bucket.end - begin > chunk_elements) {
            bucket.range.end_chunk(trees);
            bucket.range.join(trees);
        }
        return bucket;
    }

    void encode(const Codec& codec, const ScannedBucket<Codec>& bucket, float* scratch) {
        const bool one_block = bucket.end - bucket.begin <= block_size;
        for (std::int64_t first = bucket.begin; first < bucket.end; first += block_size) {
            const std::int64_t count = smaller(block_size, bucket.end - first);
            const float* c = one_block ? bucket.c : contributions(first, count, scratch);
            const Prefetcher prefetcher(c, c != scratch);
            Draws draws{nullptr, offset_};
            if constexpr (stochastic) draws.lanes = draws_of(first, count);
            if (job_.segment.next_residual == 0) {
                encode_block<Codec, stochastic, NextResidual::none>(codec, c, draws, count,
                                                                    writer_.room(count), nullptr, prefetcher);
            } else {
                auto* const next_residual = reinterpret_cast<float*>(job_.segment.next_residual) + first;
                if (job_.streaming && aligned_for_stream(next_residual))
                    encode_block<Codec, stochastic, NextResidual::streamed>(
                        codec, c, draws, count, writer_.room(count), next_residual, prefetcher);
                else
                    encode_block<Codec, stochastic, NextResidual::cached>(
                        codec, c, draws, count, writer_.room(count), next_residual, prefetcher);
            }
            writer_.append(count);
        }
    }

    // The bucket at `at` of a window.
    [[gnu::always_inline]] void encode_small(const Codec& codec, const float* c, const Draws draws,
                                             std::int64_t first, std::int64_t at, typename Codec::Code* codes,
                                             const Prefetcher prefetcher) const {
        if constexpr (stochastic) {
            encode_whole_vectors<Codec, true, NextResidual::none>(codec, c, {draws.lanes + at, offset_},
                                                                  bucket_size_, codes, nullptr, prefetcher);
        } else if (job_.segment.next_residual == 0) {
            encode_whole_vectors<Codec, false, NextResidual::none>(codec, c, draws, bucket_size_, codes,
                                                                   nullptr, prefetcher);
        } else {
            auto* const next_residual = reinterpret_cast<float*>(job_.segment.next_residual) + first + at;
            if (job_.streaming && aligned_for_stream(next_residual))
                encode_whole_vectors<Codec, false, NextResidual::streamed>(codec, c, draws, bucket_size_,
                                                                           codes, next_residual, prefetcher);
            else
                encode_whole_vectors<Codec, false, NextResidual::cached>(codec, c, draws, bucket_size_, codes,
                                                                         next_residual, prefetcher);
        }
    }

    // For elements first..first+count, in order. Small buckets share what is drawn at once: generators draw
    // for many elements at a time.
    const std::uint16_t* draws_of(std::int64_t first, std::int64_t count) {
        if constexpr (!OfSmallBuckets<Codec>) return random_.draw(job_.segment.start + first, count, draws_);
        if (first + count > drawn_end_) {
            const std::int64_t wanted = count > window_size ? count : window_size;
            drawn_begin_ = first;
            drawn_end_ = smaller(first + wanted, job_.segment.length);
            drawn_ = random_.draw(job_.segment.start + first, drawn_end_ - first, draws_);
        }
        return drawn_ + (first - drawn_begin_);
    }

    // Elements of small buckets that are looked at together.
    static constexpr std::int64_t window_size = 512;
    static_assert(window_size <= block_size && window_size <= chunk_elements);

    const EncodeJob& job_;
    std::int64_t bucket_size_;
    RandomStream random_;
    F32 offset_;
    CodeWriter<typename Codec::Code> writer_;
    alignas(64) float scratch_[2][block_capacity];
    alignas(64) std::uint16_t draws_[block_size + RandomStream::slack];
    const std::uint16_t* drawn_ = nullptr;
    std::int64_t drawn_begin_ = 0, drawn_end_ = 0;
};

}  // namespace gradcomp::GRADCOMP_BODY
