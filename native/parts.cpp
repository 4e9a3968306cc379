#include "parts.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "threads.hpp"

namespace gradcomp {

namespace {

// Fewer elements are not worth a thread: waking it takes as long as they do.
constexpr std::int64_t least_elements = 1 << 16;

// Of a call, for each of its threads: others take those of a thread that is held up.
constexpr std::int64_t shares_per_thread = 8;

// Parts of a row begin at multiples of this; 0: the row is one part. Sixty-four elements keep the alignment
// of gradients and outputs to cache lines, and begin a byte of codes of any width.
std::int64_t border(Codec codec, const Segment& segment, bool encodes) {
    if (is_allocated(codec) || (encodes && codec == Codec::nvfp4)) return 0;
    constexpr std::int64_t line = 64;
    return scale_record_bytes(codec) == 0 ? line : std::lcm(line, std::int64_t{segment.bucket_size});
}

// The parts of a call, and which of them make a share of its work: shares[i] .. shares[i + 1].
struct Division {
    std::vector<Part> parts;
    std::vector<std::size_t> shares;
    int threads = 1;
};

// The result is valid until the calling thread divides another call: small calls would notice an allocation.
template <class Skips>
Division& divide(Codec codec, const SegmentTable& table, bool encodes, Skips skips) {
    std::int64_t elements = 0;
    for (std::int64_t row = 0; row < table.size(); ++row) {
        const Segment segment = table[row];
        if (!skips(segment)) elements += segment.length;
    }
    const std::int64_t worth = std::min(std::int64_t{threads()}, elements / least_elements);
    thread_local Division found;
    found.parts.clear();
    found.shares.assign(1, 0);
    found.threads = static_cast<int>(std::max(worth, std::int64_t{1}));
    const std::int64_t share = std::max(elements / (shares_per_thread * found.threads), least_elements);
    std::int64_t sum = 0;
    for (std::int64_t row = 0; row < table.size(); ++row) {
        const Segment segment = table[row];
        if (skips(segment)) continue;
        std::int64_t most = segment.length;
        const std::int64_t unit = found.threads > 1 ? border(codec, segment, encodes) : 0;
        if (unit > 0) most = std::min(most, (share + unit - 1) / unit * unit);
        std::int64_t first = 0;
        do {
            const std::int64_t length = std::min(most, segment.length - first);
            found.parts.push_back({row, first, length, false});
            first += length;
            sum += length;
            if (sum < share) continue;
            found.shares.push_back(found.parts.size());
            sum = 0;
        } while (first < segment.length);
    }
    if (found.shares.back() < found.parts.size()) found.shares.push_back(found.parts.size());
    return found;
}

template <class Call>
void run(void (*kernel)(const Call&, std::span<Part>), const Call& call, Division& division) {
    if (division.threads == 1) return kernel(call, division.parts);
    const auto run_share = [&](std::int64_t share) {
        const std::size_t* const begin = division.shares.data() + share;
        kernel(call, std::span(division.parts).subspan(begin[0], begin[1] - begin[0]));
    };
    run_on_threads(static_cast<std::int64_t>(division.shares.size()) - 1, division.threads, run_share);
}

// What an encoder leaves behind for segments that are not finite.
void discard(Codec codec, const SegmentTable& table, const Division& division, std::uint8_t* payload,
             std::uint8_t* flags) {
    for (const Part& part : division.parts) {
        if (!part.failed) continue;
        const Segment segment = table[part.row];
        std::memset(payload + segment.payload, 0, static_cast<std::size_t>(wire_bytes(codec, segment)));
        flags[part.row] |= 1;
    }
}

bool never(const Segment&) {
    return false;
}

bool has_no_output(const Segment& segment) {
    return segment.output == 0;
}

std::uint64_t moved(std::uint64_t address, std::int64_t bytes) {
    return address == 0 ? 0 : address + static_cast<std::uint64_t>(bytes);
}

}  // namespace

Piece piece_of(Codec codec, const SegmentTable& table, const Part& part) {
    Segment segment = table[part.row];
    const std::int64_t unit = codec == Codec::nvfp4 && segment.length > 0 ? 4 : 0;
    const std::int64_t bucket = part.first / segment.bucket_size;
    const std::int64_t scales = segment.payload + unit + bucket * scale_record_bytes(codec);
    const std::int64_t codes =
        segment.payload + scale_bytes(codec, segment) + part.first / 8 * code_bits(codec, segment);
    const std::int64_t item = segment.dtype == Dtype::float64 ? 8 : segment.dtype == Dtype::float32 ? 4 : 2;
    segment.gradient = moved(segment.gradient, item * part.first);
    segment.output = moved(segment.output, item * part.first);
    segment.residual = moved(segment.residual, 4 * part.first);
    segment.next_residual = moved(segment.next_residual, 4 * part.first);
    segment.start += part.first;
    segment.length = part.length;
    return {segment, scales, codes};
}

void encode(const EncodeCall& call) {
    Division& division = divide(call.codec, call.table, true, never);
    run(active_kernels().encode, call, division);
    discard(call.codec, call.table, division, call.payload, call.flags);
}

void reduce(const ReduceCall& call) {
    Division& division = divide(call.codec, call.table, true, never);
    run(active_kernels().reduce, call, division);
    discard(call.codec, call.table, division, call.out, call.flags);
}

void decode(const DecodeCall& call) {
    Division& division = divide(call.codec, call.table, false, has_no_output);
    run(active_kernels().decode, call, division);
    for (const Part& part : division.parts)
        if (part.failed) call.flags[part.row] |= 1;
}

void decode_add(const DecodeAddCall& call) {
    Division& division = divide(call.codec, call.table, false, has_no_output);
    run(active_kernels().decode_add, call, division);
}

}  // namespace gradcomp
