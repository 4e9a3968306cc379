// Lists of indices and the bit streams that they are coded as; gradcomp/kernels/reference_indices.py has the layout. A
// tile is 1024 bytes of a stream, or 1024 indices; a thread takes a word of 32 bits. Streams begin at any
// byte.

#include "common.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace {

constexpr std::int64_t tile_bits = 8192;
constexpr int per_thread = 4;  // indices

// What is wrong with a row.
constexpr std::uint32_t padding_set = 1, wrong_number = 2, not_ascending = 4, out_of_range = 8;

// One of fields: the low `width` bits of each index, one after another. One of positions: bit (index >>
// width), or that much plus the number of the index, is set for each.
struct Stream {
    std::int64_t row;
    std::int64_t positions, unary;  // whether
    std::int64_t width;
    std::int64_t count, length;        // indices, and what they are below
    std::int64_t offset;               // of the first index
    std::int64_t place, bits;          // first byte, and size
    std::int64_t low_place, low_bits;  // of the fields that go with positions, if there are any

    std::int64_t position(std::uint32_t index, std::int64_t number) const {
        return (std::int64_t{index} >> width) + (unary != 0 ? number : 0);
    }
};

// A thread's word of a stream.
struct Word {
    Stream stream;
    std::int64_t tile;   // of the stream
    std::int64_t begin;  // bit
    std::int64_t bytes;  // of the word that are the stream's

    Word(std::uint64_t streams, std::uint64_t tiles, std::int64_t count) {
        const auto* begins = at<std::int64_t>(tiles);
        const std::int64_t row = row_of(begins, count, blockIdx.x);
        stream = at<Stream>(streams)[row];
        tile = blockIdx.x - begins[row];
        begin = tile * tile_bits + 32 * std::int64_t{threadIdx.x};
        bytes = smaller(4, (stream.bits + 7) / 8 - begin / 8);
    }

    std::int64_t place() const { return stream.place + begin / 8; }
};

inline std::uint32_t read_word(const std::uint8_t* from, std::int64_t bytes) {
    if (bytes == 4 && aligned(from, 4)) return *reinterpret_cast<const std::uint32_t*>(from);
    std::uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < bytes) word |= static_cast<std::uint32_t>(from[i]) << (8 * i);
    return word;
}

inline void write_word(std::uint8_t* to, std::int64_t bytes, std::uint32_t word) {
    if (bytes == 4 && aligned(to, 4)) {
        *reinterpret_cast<std::uint32_t*>(to) = word;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < bytes) to[i] = static_cast<std::uint8_t>(word >> (8 * i));
}

inline std::uint64_t low_mask(std::int64_t width) {
    return (std::uint64_t{1} << width) - 1;
}

inline void complain(std::uint64_t wrong, std::int64_t row, std::uint32_t what) {
    atomicOr(to<std::uint32_t>(wrong) + row, what);
}

// --- encoding ---

inline std::uint32_t fields_word(const Word& word, const std::uint32_t* indices) {
    const Stream& stream = word.stream;
    std::uint32_t found = 0;
    for (std::int64_t i = word.begin / stream.width; i < stream.count && i * stream.width < word.begin + 32;
         ++i) {
        const std::uint64_t field = indices[i] & low_mask(stream.width);
        const std::int64_t shift = i * stream.width - word.begin;
        found |= static_cast<std::uint32_t>(shift >= 0 ? field << shift : field >> -shift);
    }
    return found;
}

// The first index, of those that ascend, whose position is not below a bit.
inline std::int64_t first_from(const Stream& stream, const std::uint32_t* indices, std::int64_t bit) {
    std::int64_t low = 0, high = stream.count;
    while (low < high) {
        const std::int64_t middle = (low + high) / 2;
        if (stream.position(indices[middle], middle) < bit)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

inline std::uint32_t positions_word(const Word& word, const std::uint32_t* indices, std::uint32_t* words) {
    const Stream& stream = word.stream;
    const std::int64_t begin = word.tile * tile_bits;
    words[threadIdx.x] = 0;
    __syncthreads();
    const std::int64_t end = first_from(stream, indices, begin + tile_bits);
    for (std::int64_t i = first_from(stream, indices, begin) + threadIdx.x; i < end; i += 256) {
        const std::int64_t bit = stream.position(indices[i], i) - begin;
        // Indices that do not ascend are refused later, so a bit may lie outside the tile here.
        if (bit >= 0 && bit < tile_bits) atomicOr(words + bit / 32, std::uint32_t{1} << (bit % 32));
    }
    __syncthreads();
    return words[threadIdx.x];
}

}  // namespace

struct CodeParams {
    std::uint64_t streams, tiles;
    std::int64_t count;
    std::uint64_t indices, payload;
    std::uint64_t wrong;   // by row, of what is refused
    std::uint64_t begins;  // by tile: first how many bits are set in it, then how many are before it
};

KERNEL(256) encode_streams(const CodeParams __grid_constant__ params) {
    __shared__ std::uint32_t words[256];
    const Word word(params.streams, params.tiles, params.count);
    const std::uint32_t* const indices = at<std::uint32_t>(params.indices) + word.stream.offset;
    std::uint32_t found;
    if (word.stream.positions != 0)
        found = positions_word(word, indices, words);
    else
        found = fields_word(word, indices);
    write_word(to<std::uint8_t>(params.payload) + word.place(), word.bytes, found);
}

// --- decoding ---

namespace {

// The bits of a thread's word that stand for indices; `padding` gets the others.
inline std::uint32_t read_positions(const Word& word, std::uint64_t payload, std::uint32_t& padding) {
    padding = 0;
    if (word.bytes <= 0) return 0;
    const std::uint32_t read = read_word(at<std::uint8_t>(payload) + word.place(), word.bytes);
    const std::int64_t left = word.stream.bits - word.begin;
    if (left >= 32) return read;
    padding = static_cast<std::uint32_t>(read >> left);
    return read & static_cast<std::uint32_t>(low_mask(left));
}

// The sum of what the threads before this one bring; `total` is that of all.
inline std::uint32_t sum_before(std::uint32_t value, std::uint32_t& total) {
    __shared__ std::uint32_t of_warps[8];
    const unsigned lane = threadIdx.x % 32;
    std::uint32_t sum = value;
    for (unsigned distance = 1; distance < 32; distance *= 2) {
        const std::uint32_t other = __shfl_up_sync(0xFFFFFFFF, sum, distance);
        if (lane >= distance) sum += other;
    }
    __syncthreads();  // of what an earlier call left there
    if (lane == 31) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    total = 0;
    std::uint32_t before = sum - value;
    for (unsigned warp = 0; warp < 8; ++warp) {
        if (warp < threadIdx.x / 32) before += of_warps[warp];
        total += of_warps[warp];
    }
    return before;
}

// A field of the low bits: at most five bytes, all of them the stream's.
inline std::uint64_t low_field(const Stream& stream, const std::uint8_t* payload, std::int64_t number) {
    const std::int64_t begin = number * stream.width, end = begin + stream.width;
    std::uint64_t bits = 0;
    for (std::int64_t byte = begin / 8; 8 * byte < end; ++byte)
        bits |= std::uint64_t{payload[stream.low_place + byte]} << (8 * (byte - begin / 8));
    return bits >> (begin % 8) & low_mask(stream.width);
}

}  // namespace

KERNEL(256) count_positions(const CodeParams __grid_constant__ params) {
    const Word word(params.streams, params.tiles, params.count);
    std::uint32_t padding, total;
    sum_before(static_cast<std::uint32_t>(__popc(read_positions(word, params.payload, padding))), total);
    const Stream& stream = word.stream;
    if (word.tile == 0 && threadIdx.x == 0 && stream.low_bits % 8 != 0)
        padding |= static_cast<std::uint32_t>(
            at<std::uint8_t>(params.payload)[stream.low_place + stream.low_bits / 8] >>
            (stream.low_bits % 8));
    if (padding != 0) complain(params.wrong, stream.row, padding_set);
    if (threadIdx.x == 0) to<std::int64_t>(params.begins)[blockIdx.x] = total;
}

// One block per stream.
KERNEL(256) add_counts(const CodeParams __grid_constant__ params) {
    const Stream stream = at<Stream>(params.streams)[blockIdx.x];
    const std::int64_t first = at<std::int64_t>(params.tiles)[blockIdx.x];
    const std::int64_t tiles = at<std::int64_t>(params.tiles)[blockIdx.x + 1] - first;
    std::int64_t* const begins = to<std::int64_t>(params.begins) + first;
    std::int64_t sum = 0;
    for (std::int64_t i = threadIdx.x; i - threadIdx.x < tiles; i += 256) {
        std::uint32_t total;
        const std::uint32_t before = sum_before(i < tiles ? static_cast<std::uint32_t>(begins[i]) : 0, total);
        if (i < tiles) begins[i] = sum + before;
        sum += total;
    }
    if (threadIdx.x == 0 && sum != stream.count) complain(params.wrong, stream.row, wrong_number);
}

KERNEL(256) decode_positions(const CodeParams __grid_constant__ params) {
    const Word word(params.streams, params.tiles, params.count);
    const Stream& stream = word.stream;
    std::uint32_t padding, total;
    std::uint32_t bits = read_positions(word, params.payload, padding);
    std::int64_t number = at<std::int64_t>(params.begins)[blockIdx.x] +
                          sum_before(static_cast<std::uint32_t>(__popc(bits)), total);
    auto* const indices = to<std::uint32_t>(params.indices) + stream.offset;
    bool beyond = false;
    // Bits beyond the list's count are not written; the row is refused.
    for (; bits != 0 && number < stream.count; bits &= bits - 1, ++number) {
        std::int64_t index = word.begin + __ffs(static_cast<int>(bits)) - 1;
        if (stream.unary != 0) index -= number;
        index <<= stream.width;
        if (stream.low_bits != 0)
            index += static_cast<std::int64_t>(low_field(stream, at<std::uint8_t>(params.payload), number));
        beyond |= index >= stream.length;
        indices[number] = static_cast<std::uint32_t>(index);
    }
    if (beyond) complain(params.wrong, stream.row, out_of_range);
}

struct List {
    std::int64_t row, count, length, offset;
    std::int64_t place;  // of the bytes of each index, or -1: all of a row
};

struct ListParams {
    std::uint64_t lists, tiles;
    std::int64_t count;
    std::uint64_t indices, payload, wrong;
};

KERNEL(256) copy_lists(const ListParams __grid_constant__ params) {
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.count, blockIdx.x);
    const List list = at<List>(params.lists)[row];
    auto* const indices = to<std::uint32_t>(params.indices) + list.offset;
    const std::int64_t begin = (blockIdx.x - tiles[row]) * 256 * per_thread;
    for (std::int64_t i = begin + threadIdx.x; i < smaller(list.count, begin + 256 * per_thread); i += 256)
        indices[i] = list.place < 0 ? static_cast<std::uint32_t>(i)
                                    : read_word(at<std::uint8_t>(params.payload) + list.place + 4 * i, 4);
}

KERNEL(256) check_lists(const ListParams __grid_constant__ params) {
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.count, blockIdx.x);
    const List list = at<List>(params.lists)[row];
    const std::uint32_t* const indices = at<std::uint32_t>(params.indices) + list.offset;
    const std::int64_t begin = (blockIdx.x - tiles[row]) * 256 * per_thread;
    std::uint32_t wrong = 0;
    for (std::int64_t i = begin + threadIdx.x; i < smaller(list.count, begin + 256 * per_thread); i += 256) {
        if (i > 0 && indices[i] <= indices[i - 1]) wrong |= not_ascending;
        if (i == list.count - 1 && indices[i] >= list.length) wrong |= out_of_range;
    }
    if (wrong != 0) complain(params.wrong, list.row, wrong);
}
