#include "segment.hpp"

#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>

namespace gradcomp {

namespace {

void require(bool condition, std::int64_t row, const std::string& complaint) {
    if (!condition) throw std::invalid_argument("segment " + std::to_string(row) + ": " + complaint);
}

struct Levels {
    int first, last;
};

// The numbers of bits that a quantising codec takes; casts ignore them.
Levels levels(Codec codec) {
    switch (codec) {
        case Codec::minmax:
        case Codec::l2:
        case Codec::linf:
        case Codec::minmax_least_bytes:
        case Codec::minmax_least_error:
        case Codec::minmax_shift:
            return {1, 8};
        case Codec::sign:
        case Codec::vote:
        case Codec::onebit:
            return {1, 1};
        case Codec::codebook_l2:
        case Codec::codebook_linf:
            return {2, 8};
        case Codec::codebook_minmax:
            return {1, 7};
        case Codec::e4m3:
        case Codec::e5m2:
            return {8, 8};
        case Codec::e2m1:
        case Codec::nvfp4:
            return {4, 4};
        default:
            return {INT_MIN, INT_MAX};
    }
}

}  // namespace

int code_bits(Codec codec, const Segment& segment) {
    switch (codec) {
        case Codec::fp32:
            return 32;
        case Codec::fp64:
            return 64;
        case Codec::fp16:
        case Codec::bf16:
            return 16;
        default:
            return segment.bits;
    }
}

int scale_record_bytes(Codec codec) {
    switch (codec) {
        case Codec::minmax:
        case Codec::onebit:
        case Codec::minmax_shift:
        case Codec::codebook_minmax:
            return 8;
        case Codec::l2:
        case Codec::linf:
        case Codec::fp16:
        case Codec::sign:
        case Codec::vote:
        case Codec::codebook_l2:
        case Codec::codebook_linf:
            return 4;
        case Codec::e4m3:
        case Codec::e5m2:
        case Codec::e2m1:
        case Codec::nvfp4:
            return 1;
        case Codec::minmax_least_bytes:
        case Codec::minmax_least_error:
            return 9;
        default:
            return 0;
    }
}

std::int64_t scale_bytes(Codec codec, const Segment& segment) {
    const std::int64_t buckets = (segment.length + segment.bucket_size - 1) / segment.bucket_size;
    // A unit, of which scales are multiples, comes first.
    const std::int64_t unit = codec == Codec::nvfp4 && segment.length > 0 ? 4 : 0;
    return unit + buckets * scale_record_bytes(codec);
}

namespace {

// Groups of eight values, counted bucket by bucket.
std::int64_t groups(const Segment& segment) {
    const std::int64_t size = segment.bucket_size;
    return segment.length / size * ((size + 7) / 8) + (segment.length % size + 7) / 8;
}

}  // namespace

std::int64_t used_bytes(const Segment& segment, const std::uint8_t* payload) {
    const std::int64_t size = segment.bucket_size, buckets = (segment.length + size - 1) / size;
    const std::uint8_t* const bits = payload + 8 * buckets;
    std::int64_t sum = 0;
    std::uint8_t most = 0;
    for (std::int64_t k = 0; k < buckets; ++k) {
        sum += bits[k];
        most = bits[k] > most ? bits[k] : most;
    }
    if (most > 8) return -1;
    std::int64_t used = sum * ((size + 7) / 8);
    if (segment.length % size != 0)
        used += bits[buckets - 1] * ((segment.length % size + 7) / 8 - (size + 7) / 8);
    return used <= groups(segment) * segment.bits ? 9 * buckets + used : -1;
}

std::int64_t wire_bytes(Codec codec, const Segment& segment) {
    if (is_allocated(codec)) return scale_bytes(codec, segment) + groups(segment) * segment.bits;
    return scale_bytes(codec, segment) + (segment.length * code_bits(codec, segment) + 7) / 8;
}

Segment SegmentTable::operator[](std::int64_t row) const {
    Segment segment;
    std::memcpy(&segment, rows_ + row * std::int64_t{sizeof(Segment)}, sizeof(Segment));
    return segment;
}

void check_elements(std::int64_t row, const Segment& segment) {
    require(segment.dtype >= Dtype::float32 && segment.dtype <= Dtype::float64, row, "unknown dtype");
    require(segment.length >= 0 && segment.length <= max_elements && segment.start >= 0 &&
                segment.start <= max_elements - segment.length,
            row, "elements start..start+length are not in 0.." + std::to_string(max_elements));
}

void check_segment(Codec codec, std::int64_t row, const Segment& segment, std::int64_t payload_size) {
    check_elements(row, segment);
    require(segment.bucket_size >= 1, row, "bucket_size is not positive");
    require((segment.dtype == Dtype::float64) == (codec == Codec::fp64), row,
            "dtype float64 goes with codec FP64, and FP64 with nothing else");
    const Levels allowed = levels(codec);
    require(segment.bits >= allowed.first && segment.bits <= allowed.last, row,
            "bits is not in " + std::to_string(allowed.first) + ".." + std::to_string(allowed.last));
    // Written as a difference: the sum of a hostile offset and a size could wrap.
    require(segment.payload >= 0 && segment.payload <= payload_size - wire_bytes(codec, segment), row,
            "the segment does not lie inside the payload of " + std::to_string(payload_size) + " bytes");
}

void check_magnitudes(Codec codec, const float* magnitudes) {
    const bool wanted =
        codec == Codec::codebook_l2 || codec == Codec::codebook_linf || codec == Codec::codebook_minmax;
    if ((magnitudes != nullptr) != wanted)
        throw std::invalid_argument("magnitudes go with the codebook codecs, and with nothing else");
}

void check_magnitudes_row(Codec codec, const float* magnitudes, int bits) {
    const float* const row = magnitudes + bits * magnitudes_per_row;
    const bool signs = codec != Codec::codebook_minmax;
    const int last = (1 << (signs ? bits - 1 : bits)) - 1;
    bool ascend = signs ? row[0] == 0.0f && row[last] == 1.0f : row[0] >= 0.0f && row[last] <= 1.0f;
    for (int i = 0; i < last; ++i) ascend = ascend && row[i] <= row[i + 1];
    if (!ascend)
        throw std::invalid_argument("magnitudes for " + std::to_string(bits) + " bits do not ascend " +
                                    (signs ? "from 0 to 1" : "within 0..1"));
}

Codec check_codec(int number) {
    if (number < 0 || number > static_cast<int>(Codec::codebook_minmax))
        throw std::invalid_argument("unknown codec " + std::to_string(number));
    return static_cast<Codec>(number);
}

}  // namespace gradcomp
