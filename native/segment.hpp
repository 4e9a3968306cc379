// The segment table and the layout of payloads; gradcomp/kernels/segments.py describes both.
#pragma once

#include <cstdint>

namespace gradcomp {

enum class Codec : std::int32_t {
    minmax = 0,
    l2 = 1,
    linf = 2,
    fp32 = 3,
    fp16 = 4,
    bf16 = 5,
    fp64 = 6,
    sign = 7,
    vote = 8,
    onebit = 9,
    codebook_l2 = 10,
    codebook_linf = 11,
    e4m3 = 12,
    e5m2 = 13,
    e2m1 = 14,
    minmax_least_bytes = 15,
    minmax_least_error = 16,
    nvfp4 = 17,
    minmax_shift = 18,
    codebook_minmax = 19,
};

enum class Dtype : std::int32_t { float32 = 0, float16 = 1, bfloat16 = 2, float64 = 3 };

// A row of the table, as it lies in memory.
struct Segment {
    std::uint64_t gradient;       // address, 0: absent
    std::uint64_t residual;       // address of float32, 0: none
    std::uint64_t next_residual;  // address of float32, 0: none
    std::uint64_t output;         // address, 0: do not write
    std::int64_t payload;         // byte offset
    std::int64_t start;           // number of the first element within the layer
    std::int64_t length;          // elements
    std::uint32_t layer;          // hash, a word of the random counter
    std::int32_t bits;            // of a code; the column `level`, which casts ignore
    std::int32_t bucket_size;
    Dtype dtype;
};
static_assert(sizeof(Segment) == 72);

// The random counter holds element / 8 in 32 bits.
inline constexpr std::int64_t max_elements = std::int64_t{1} << 35;

// The rank in the random counter of a chunk's owner, who encodes the mean.
inline constexpr std::uint32_t owner_rank = 0xFFFFFFFF;

// A codebook's magnitudes: row b holds those for b bits, from 0 to 1, or the levels of codebook_minmax.
inline constexpr std::int64_t magnitude_rows = 9;
inline constexpr std::int64_t magnitudes_per_row = 128;

// Bits of an element's code; with bits by bucket, of the mean code.
int code_bits(Codec codec, const Segment& segment);

// Bytes of one bucket's scale record.
int scale_record_bytes(Codec codec);

// Whether buckets have bits of their own.
inline bool is_allocated(Codec codec) {
    return codec == Codec::minmax_least_bytes || codec == Codec::minmax_least_error;
}

// Bytes that the payload of a segment whose buckets have bits of their own uses of its room; -1 if what it
// says of itself is not possible.
std::int64_t used_bytes(const Segment& segment, const std::uint8_t* payload);

// Bytes of all scale records, and of what precedes those; the codes follow.
std::int64_t scale_bytes(Codec codec, const Segment& segment);

// Bytes of the whole payload.
std::int64_t wire_bytes(Codec codec, const Segment& segment);

// The rows of a table, which need not be aligned.
class SegmentTable {
  public:
    SegmentTable(const std::uint8_t* rows, std::int64_t size) : rows_(rows), size_(size) {}

    std::int64_t size() const { return size_; }
    Segment operator[](std::int64_t row) const;

  private:
    const std::uint8_t* rows_;
    std::int64_t size_;
};

// Throw std::invalid_argument, naming the row, unless elements and dtype are in range.
void check_elements(std::int64_t row, const Segment& segment);

// Throw std::invalid_argument, naming the row, unless it is well formed and lies inside a payload of that
// size.
void check_segment(Codec codec, std::int64_t row, const Segment& segment, std::int64_t payload_size);

// Throw std::invalid_argument unless a codebook has magnitudes and no other codec has.
void check_magnitudes(Codec codec, const float* magnitudes);

// Throw std::invalid_argument unless the magnitudes for so many bits ascend from 0 to 1; levels ascend within
// that.
void check_magnitudes_row(Codec codec, const float* magnitudes, int bits);

// Throw std::invalid_argument for a number that is no codec.
Codec check_codec(int number);

}  // namespace gradcomp
