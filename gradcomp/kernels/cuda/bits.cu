// Codes of segments whose buckets have bits of their own. Ranges come first, a team for each bucket, then the
// choice, a block for each row, then codes, eight for each thread. Before anything is decoded, a block for
// each row and payload adds up bits to where codes are.

#include "native/body/allocate.hpp"
#include "native/body/finish.hpp"

#include "block.cuh"
#include "philox.cuh"
#include "sources.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

struct BitsParams {
    std::uint64_t rows, places;  // see Place
    std::int64_t row_count;
    std::uint64_t payload;        // written, or, to decode, read
    std::uint64_t bad;            // a byte per row: something is not finite
    std::uint64_t flags;          // a byte per row, of decode: the output is NaN
    std::uint64_t starts;         // of all buckets, where in the row's payload the codes begin; by payload
    std::uint64_t first_buckets;  // number of the first bucket of each row
    std::int64_t buckets;         // of all rows
    std::uint64_t possible;       // a byte per payload and row: its bits are
    std::uint64_t values;         // contributions of reduce
    std::uint64_t first_values;   // number of the first one of each row
    std::uint64_t payloads;       // addresses
    std::int64_t payload_count;
    std::int64_t codec;
    std::uint64_t seed;
    std::int64_t step, rank;
    double scale, decay, divisor;
};

inline std::int64_t buckets_of(const Segment& segment) {
    return (segment.length + segment.bucket_size - 1) / segment.bucket_size;
}

// Values of a bucket.
inline std::int64_t size_of(const Segment& segment, std::int64_t bucket) {
    return smaller(segment.bucket_size, segment.length - bucket * segment.bucket_size);
}

inline std::int64_t room_of(const Segment& segment) {
    const std::int64_t size = segment.bucket_size;
    const std::int64_t groups = segment.length / size * groups_of(size) + groups_of(segment.length % size);
    return 9 * buckets_of(segment) + groups * segment.bits;
}

inline std::int64_t* starts_of(const BitsParams& params, std::uint32_t row, std::int64_t payload) {
    return to<std::int64_t>(params.starts) + payload * params.buckets +
           at<std::int64_t>(params.first_buckets)[row];
}

// Where the codes of every bucket begin, from bits; by a block. Returns where the last ones end.
template <class Bits>
inline std::int64_t add_up(const Segment& segment, std::int64_t* starts, Bits bits) {
    const std::int64_t buckets = buckets_of(segment);
    std::int64_t at = 9 * buckets;
    for (std::int64_t first = 0; first < buckets; first += 256) {
        const std::int64_t bucket = first + threadIdx.x;
        const std::int64_t bytes =
            bucket < buckets ? groups_of(size_of(segment, bucket)) * bits(bucket) : std::int64_t{0};
        std::int64_t total;
        const std::int64_t before = sum_before<std::int64_t>(bytes, total);
        if (bucket < buckets) starts[bucket] = at + before;
        at += total;
    }
    return at;
}

// --- to decode ---

// A row's payload of decode, or one of those of reduce.
inline const std::uint8_t* payload_of(const BitsParams& params, const Segment& segment, std::int64_t number) {
    const bool one = params.payload_count == 0;
    return at<std::uint8_t>(one ? params.payload : at<std::uint64_t>(params.payloads)[number]) +
           segment.payload;
}

inline void find_starts(const BitsParams& params) {
    const Place place(params.places, blockIdx.x);
    const Segment& segment = at<Segment>(params.rows)[place.row];
    const std::int64_t payload = place.tile;
    const std::uint8_t* const bits = payload_of(params, segment, payload) + 8 * buckets_of(segment);
    int largest = 0;
    const std::int64_t end = add_up(segment, starts_of(params, place.row, payload), [&](std::int64_t bucket) {
        const int found = bits[bucket];
        largest = found > largest ? found : largest;
        return found;
    });
    largest = reduce_block(largest, [](int a, int b) { return a > b ? a : b; });
    if (threadIdx.x == 0)
        to<std::uint8_t>(params.possible)[payload * params.row_count + place.row] =
            largest <= 8 && end <= room_of(segment) ? 1 : 0;
}

// One payload of a row.
class Coded {
  public:
    Coded(const BitsParams& params, const Segment& segment, std::uint32_t row, std::int64_t payload)
        : segment_(segment),
          payload_(payload_of(params, segment, payload)),
          starts_(starts_of(params, row, payload)),
          possible_(at<std::uint8_t>(params.possible)[payload * params.row_count + row] != 0) {}

    bool possible() const { return possible_; }

    MinMax codec(std::int64_t bucket) const {
        std::uint8_t record[8];
        std::memcpy(record, payload_ + 8 * bucket, sizeof record);
        return MinMax(record, Level(bits(bucket)));
    }

    // Values of elements first..first+count, count <= 8; NaN if the payload is not what it says of itself.
    void read(std::int64_t first, int count, float (&values)[8]) const {
        std::int64_t known = -1, begin = 0;
        MinMax codec(0.0f, 0.0f, 0);
        for (int i = 0; i < count; ++i) {
            values[i] = float_of(0x7FC00000);
            if (!possible_) continue;
            const std::int64_t bucket = (first + i) / segment_.bucket_size;
            if (bucket != known) {
                known = bucket, begin = bucket * segment_.bucket_size;
                codec = this->codec(bucket);
            }
            const int width = bits(bucket);
            const I32 code =
                width == 0 ? splat(0)
                           : read_code<std::uint8_t>(payload_ + starts_[bucket], first + i - begin, width);
            values[i] = codec.value(code).v;
        }
    }

  private:
    int bits(std::int64_t bucket) const { return payload_[8 * buckets_of(segment_) + bucket]; }

    const Segment& segment_;
    const std::uint8_t* payload_;
    const std::int64_t* starts_;
    bool possible_;
};

// Eight elements of a row.
struct Eight {
    std::uint32_t row;
    const Segment& segment;
    std::int64_t first;
    int count;

    explicit Eight(const BitsParams& params, const Place& place)
        : row(place.row),
          segment(at<Segment>(params.rows)[place.row]),
          first(8 * (std::int64_t{place.tile} * 256 + threadIdx.x)),
          count(count_of(segment.length - first)) {}
};

inline void decode_row(const BitsParams& params) {
    const Eight eight(params, Place(params.places, blockIdx.x));
    const Segment& segment = eight.segment;
    float x[8];
    if (at<std::uint8_t>(params.flags)[eight.row] != 0) {
        for (float& each : x) each = float_of(0x7FC00000);
        if (eight.count > 0) write_output(segment, eight.first, eight.count, x);
        return;
    }
    const Coded coded(params, segment, eight.row, 0);
    const Finish finish(static_cast<float>(params.divisor), static_cast<float>(params.scale));
    bool bad = !coded.possible();
    // A thread judges the buckets that begin among its elements.
    const std::int64_t size = segment.bucket_size, end = eight.first + eight.count;
    for (std::int64_t bucket = (eight.first + size - 1) / size; !bad && bucket * size < end; ++bucket) {
        const MinMax codec = coded.codec(bucket);
        for (const float bound : codec.bounds) bad |= overflows(finish(bound), segment.dtype);
    }
    if (eight.count > 0) {
        coded.read(eight.first, eight.count, x);
        finish(x);
        write_output(segment, eight.first, eight.count, x);
    }
    if (bad) to<std::uint8_t>(params.bad)[eight.row] = 1;
}

inline void add_row(const BitsParams& params) {
    const Eight eight(params, Place(params.places, blockIdx.x));
    if (eight.count <= 0) return;
    const Coded coded(params, eight.segment, eight.row, 0);
    const Finish finish(1.0f, static_cast<float>(params.scale));
    float x[8] = {}, sum[8] = {};
    coded.read(eight.first, eight.count, x);
    finish(x);
    float* const sums = to<float>(eight.segment.output) + eight.first;
    read_floats(sums, eight.count, sum);
    for (int i = 0; i < 8; ++i) x[i] = sum[i] + x[i];
    write_floats(sums, eight.count, x);
}

inline void mean_of_row(const BitsParams& params) {
    const Eight eight(params, Place(params.places, blockIdx.x));
    if (eight.count <= 0) return;
    float c[8] = {};
    for (std::int64_t payload = 0; payload < params.payload_count; ++payload) {
        float x[8] = {};
        Coded(params, eight.segment, eight.row, payload).read(eight.first, eight.count, x);
        for (int i = 0; i < 8; ++i) c[i] = payload == 0 ? x[i] : c[i] + x[i];
    }
    Finish(static_cast<float>(params.divisor), 1.0f)(c);
    if (eight.segment.residual != 0) {
        float r[8] = {};
        read_floats(at<float>(eight.segment.residual) + eight.first, eight.count, r);
        const auto decay = static_cast<float>(params.decay);
        for (int i = 0; i < 8; ++i) c[i] = c[i] + decay * r[i];
    }
    write_floats(to<float>(params.values) + at<std::int64_t>(params.first_values)[eight.row] + eight.first,
                 eight.count, c);
}

// --- to encode ---

// Contributions that were computed before.
class FromValues {
  public:
    FromValues(const BitsParams& params, const Segment&, std::uint32_t row)
        : values_(at<float>(params.values) + at<std::int64_t>(params.first_values)[row]) {}

    void read(std::int64_t first, std::int64_t count, float (&c)[8]) const {
        read_floats(values_ + first, count, c);
    }

  private:
    const float* values_;
};

class FromMemory : public FromGradient {
  public:
    FromMemory(const BitsParams& params, const Segment& segment, std::uint32_t)
        : FromGradient(params, segment) {}
};

// Lowest value and range of every bucket, to where the records will be.
template <class Source>
inline void find_ranges(const BitsParams& params) {
    const Place place(params.places, blockIdx.x);
    const Segment& segment = at<Segment>(params.rows)[place.row];
    const std::int64_t bucket = std::int64_t{place.tile} * (256 / team_threads) + threadIdx.x / team_threads;
    const std::int64_t begin = bucket * segment.bucket_size;
    const std::int64_t end = bucket < buckets_of(segment) ? begin + size_of(segment, bucket) : begin;
    const Source source(params, segment, place.row);
    MinMax::Range range;
    for (std::int64_t first = begin + 8 * team_rank(); first < end; first += strip) {
        float c[8] = {};
        const int count = count_of(end - first);
        source.read(first, count, c);
        for (int i = 0; i < count; ++i) range.add({c[i]});
    }
    range.gather();
    const float low = range.low(), span = range.high() - low;  // all lanes take part
    const bool finite = range.finite() && is_finite(span);
    if (team_rank() != 0 || end == begin) return;
    if (!finite) to<std::uint8_t>(params.bad)[place.row] = 1;
    std::uint8_t* const record = to<std::uint8_t>(params.payload) + segment.payload + 8 * bucket;
    write_float(record, low);
    write_float(record + 4, span);
}

// Bits and records of a row, by a block, and where its codes begin; zeros behind the last ones.
inline void choose(const BitsParams& params) {
    __shared__ Histogram histogram;
    __shared__ int shift;
    __shared__ bool uniform;
    const std::uint32_t row = blockIdx.x;
    if (at<std::uint8_t>(params.bad)[row] != 0) return;
    const Segment& segment = at<Segment>(params.rows)[row];
    const std::int64_t buckets = buckets_of(segment);
    std::uint8_t* const payload = to<std::uint8_t>(params.payload) + segment.payload;
    const auto span = [&](std::int64_t bucket) { return read_float(payload + 8 * bucket + 4); };
    int largest = 0;
    for (std::int64_t bucket = threadIdx.x; bucket < buckets; bucket += 256) {
        const int found = is_flat(span(bucket)) ? 0 : class_of(span(bucket));
        largest = found > largest ? found : largest;
    }
    largest = reduce_block(largest, [](int a, int b) { return a > b ? a : b; });
    if (threadIdx.x == 0) histogram.largest = largest, histogram.groups = histogram.varying = 0;
    for (int i = static_cast<int>(threadIdx.x); i < classes; i += 256)
        histogram.weights[i] = histogram.counts[i] = 0;
    __syncthreads();
    const auto add = [](std::int64_t& sum, std::int64_t x) {
        atomicAdd(reinterpret_cast<unsigned long long*>(&sum), static_cast<unsigned long long>(x));
    };
    for (std::int64_t bucket = threadIdx.x; bucket < buckets; bucket += 256) {
        const std::int64_t groups = groups_of(size_of(segment, bucket));
        add(histogram.groups, groups);
        if (is_flat(span(bucket))) continue;
        const int depth = histogram.depth(span(bucket));
        add(histogram.weights[depth], Histogram::weight(span(bucket), groups));
        add(histogram.counts[depth], groups);
        add(histogram.varying, groups);
    }
    __syncthreads();
    if (threadIdx.x == 0 && largest > 0) {
        Allocation allocation;
        allocation.choose(static_cast<Codec>(params.codec), segment.bits, histogram);
        shift = allocation.shift(), uniform = allocation.uniform();
    }
    __syncthreads();
    std::uint8_t* const bits = payload + 8 * buckets;
    const std::int64_t end = add_up(segment, starts_of(params, row, 0), [&](std::int64_t bucket) {
        const int found = bits_of_bucket(histogram, shift, uniform, segment.bits, span(bucket));
        bits[bucket] = static_cast<std::uint8_t>(found);
        return found;
    });
    for (std::int64_t i = end + threadIdx.x; i < room_of(segment); i += 256) payload[i] = 0;
}

// Eight codes of one bucket.
template <bool stochastic, class Source>
inline void encode_codes(const BitsParams& params) {
    const Place place(params.places, blockIdx.x);
    if (at<std::uint8_t>(params.bad)[place.row] != 0) return;
    const Segment& segment = at<Segment>(params.rows)[place.row];
    const std::int64_t groups = groups_of(segment.bucket_size);
    const std::int64_t number = std::int64_t{place.tile} * 256 + threadIdx.x;
    const std::int64_t bucket = number / groups, from = 8 * (number % groups);
    if (bucket >= buckets_of(segment)) return;
    const std::int64_t size = size_of(segment, bucket);
    if (from >= size) return;
    const std::int64_t first = bucket * segment.bucket_size + from;
    const int count = count_of(size - from);
    float c[8] = {}, u[8] = {}, lost[8];
    Source(params, segment, place.row).read(first, count, c);
    const auto step = static_cast<std::uint32_t>(params.step), rank = static_cast<std::uint32_t>(params.rank);
    if constexpr (stochastic)
        draw(Counters({params.seed, step, rank}, segment.layer), segment.start + first, u);
    std::uint8_t* const payload = to<std::uint8_t>(params.payload) + segment.payload;
    const int bits = payload[8 * buckets_of(segment) + bucket];
    const MinMax codec(read_float(payload + 8 * bucket), read_float(payload + 8 * bucket + 4), bits);
    I32 code[8];
    for (int i = 0; i < 8; ++i) {
        code[i] = i < count ? codec.template code<stochastic>({c[i]}, {u[i]}) : splat(0);
        lost[i] = (F32{c[i]} - codec.value(code[i])).v;
    }
    if (bits > 0)
        write_codes<std::uint8_t>(payload + starts_of(params, place.row, 0)[bucket] + from / 8 * bits, group,
                                  bits, code);
    if (segment.next_residual != 0) write_floats(to<float>(segment.next_residual) + first, count, lost);
}

// From ranges to steps: all codes are written.
inline void write_records(const BitsParams& params) {
    const std::uint32_t row = blockIdx.x;
    if (at<std::uint8_t>(params.bad)[row] != 0) return;
    const Segment& segment = at<Segment>(params.rows)[row];
    std::uint8_t* const payload = to<std::uint8_t>(params.payload) + segment.payload;
    const std::int64_t buckets = buckets_of(segment);
    for (std::int64_t bucket = threadIdx.x; bucket < buckets; bucket += 256) {
        std::uint8_t* const record = payload + 8 * bucket;
        MinMax(read_float(record), read_float(record + 4), payload[8 * buckets + bucket]).write(record);
    }
}

}  // namespace gradcomp::cuda

KERNEL(256) bits_starts(const BitsParams __grid_constant__ params) {
    find_starts(params);
}
KERNEL(256) bits_decode(const BitsParams __grid_constant__ params) {
    decode_row(params);
}
KERNEL(256) bits_decode_add(const BitsParams __grid_constant__ params) {
    add_row(params);
}
KERNEL(256) bits_mean(const BitsParams __grid_constant__ params) {
    mean_of_row(params);
}
KERNEL(256) bits_encode_ranges(const BitsParams __grid_constant__ params) {
    find_ranges<FromMemory>(params);
}
KERNEL(256) bits_reduce_ranges(const BitsParams __grid_constant__ params) {
    find_ranges<FromValues>(params);
}
KERNEL(256) bits_choose(const BitsParams __grid_constant__ params) {
    choose(params);
}
KERNEL(256) bits_encode_nearest(const BitsParams __grid_constant__ params) {
    encode_codes<false, FromMemory>(params);
}
KERNEL(256) bits_encode_stochastic(const BitsParams __grid_constant__ params) {
    encode_codes<true, FromMemory>(params);
}
KERNEL(256) bits_reduce_nearest(const BitsParams __grid_constant__ params) {
    encode_codes<false, FromValues>(params);
}
KERNEL(256) bits_reduce_stochastic(const BitsParams __grid_constant__ params) {
    encode_codes<true, FromValues>(params);
}
KERNEL(256) bits_records(const BitsParams __grid_constant__ params) {
    write_records(params);
}
