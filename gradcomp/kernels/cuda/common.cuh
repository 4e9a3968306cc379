// What the kernels have in common: how a block finds its row, and how a thread reads eight elements, draws
// for them and writes their codes.
//
// A kernel takes one argument, the struct of its parameters, eight bytes each. It comes by value, in constant
// memory: no thread waits for a load before it knows where its row is.
// Its work is cut into tiles; tiles[row] is the number of the row's first tile, tiles[rows] their number in
// all.
#pragma once

#include "native/segment.hpp"

#include "native/body/codecs.hpp"

// Threads of a block, and of how many blocks a processor has registers at the same time.
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)

// A module has one family of a source's kernels, or all of them without GRADCOMP_FAMILY.
#ifndef GRADCOMP_FAMILY
#define GRADCOMP_FAMILY 0
#endif
#define IN_MODULE(family) (GRADCOMP_FAMILY == 0 || GRADCOMP_FAMILY == family)

namespace gradcomp::cuda {

inline constexpr int group = 8;  // elements whose codes fill whole bytes, and that one counter draws for

template <class T>
inline T* to(std::uint64_t address) {
    return reinterpret_cast<T*>(address);
}

template <class T>
inline const T* at(std::uint64_t address) {
    return to<T>(address);
}

// The row that a tile belongs to; rows without tiles are passed over.
inline std::int64_t row_of(const std::int64_t* tiles, std::int64_t rows, std::int64_t tile) {
    std::int64_t low = 0, high = rows;
    while (high - low > 1) {
        const std::int64_t middle = (low + high) / 2;
        if (tiles[middle] <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// To the compiler x is another number from here on: what follows from it is worked out behind, and takes no
// registers before.
inline void here(std::uint32_t& x) {
    asm volatile("" : "+r"(x));
}

// A tile's row, and its number there, from a table that the host lays out: one load, where a search would be
// several.
struct Place {
    std::uint32_t row, tile;

    Place(std::uint64_t places, std::uint32_t number) {
        const uint2 found = at<uint2>(places)[number];
        row = found.x, tile = found.y;
    }

    // The same, of which nothing is known any more.
    Place again() const {
        Place found = *this;
        here(found.row), here(found.tile);
        return found;
    }
};

// Call work(place, next, more) for every tile that is a block's: as many blocks as the device runs at a time
// share all of them. The next place is on its way while one is worked on; it counts if there are more.
template <class Params, class Work>
inline void for_tiles(const Params& params, Work work) {
    const auto tiles = static_cast<std::uint32_t>(params.tiles);
    std::uint32_t tile = blockIdx.x;
    Place place(params.places, tile);
    for (bool more = true; more;) {
        const std::uint32_t following = tile + gridDim.x;
        more = following < tiles;
        const Place next(params.places, more ? following : tile);
        work(place, next, more);
        tile = following;
        place = next;
    }
}

// Bring bytes to the cache that all processors share, by so many threads, a line of 128 bytes for each in
// turn.
inline void fetch_ahead(const void* begin, std::int64_t bytes, int thread, int threads) {
#pragma unroll 1
    for (std::int64_t i = 128 * thread; i < bytes; i += 128 * threads)
        prefetch_l2(static_cast<const std::uint8_t*>(begin) + i);
}

inline std::int64_t smaller(std::int64_t a, std::int64_t b) {
    return a < b ? a : b;
}
inline std::int64_t not_negative(std::int64_t x) {
    return x > 0 ? x : 0;
}

// How many of eight elements there are, if so many are left.
inline int count_of(std::int64_t left) {
    return left >= group ? group : left > 0 ? static_cast<int>(left) : 0;
}
inline int count_of(int left) {
    return left >= group ? group : left > 0 ? left : 0;
}

template <class T>
inline bool aligned(const T* p, int bytes) {
    return reinterpret_cast<std::uintptr_t>(p) % static_cast<std::uintptr_t>(bytes) == 0;
}

// From half precision and to it: which of the two it is, is looked at once and not for every element.
template <int n>
inline void from_halves(const std::uint16_t (&half)[n], Dtype dtype, float (&x)[n]) {
    if (dtype == Dtype::bfloat16) {
#pragma unroll
        for (int i = 0; i < n; ++i) x[i] = from_bfloat16(splat(half[i])).v;
    } else {
#pragma unroll
        for (int i = 0; i < n; ++i) x[i] = from_half(splat(half[i])).v;
    }
}

template <int n>
inline void to_halves(const float (&x)[n], Dtype dtype, std::uint16_t (&half)[n]) {
    if (dtype == Dtype::bfloat16) {
#pragma unroll
        for (int i = 0; i < n; ++i) half[i] = static_cast<std::uint16_t>(to_bfloat16({x[i]}).v);
    } else {
#pragma unroll
        for (int i = 0; i < n; ++i) half[i] = static_cast<std::uint16_t>(to_half({x[i]}).v);
    }
}

// Four neighbouring elements as they come from memory, where they lie as a vector does, and as float32. Of
// half precision that is eight bytes for a thread, and a line for a half warp: with sixteen, neighbours would
// have to swap what belongs to their vectors of the residual.
inline float4 load_four(const float* p) {
    return __ldcs(reinterpret_cast<const float4*>(p));
}
inline uint2 load_four(const std::uint16_t* p) {
    return __ldcs(reinterpret_cast<const uint2*>(p));
}
inline float4 as_floats(const float4& four, Dtype) {
    return four;
}
inline float4 as_floats(const uint2& four, Dtype dtype) {
    const std::uint16_t half[4] = {
        static_cast<std::uint16_t>(four.x), static_cast<std::uint16_t>(four.x >> 16),
        static_cast<std::uint16_t>(four.y), static_cast<std::uint16_t>(four.y >> 16)};
    float x[4];
    from_halves(half, dtype, x);
    return make_float4(x[0], x[1], x[2], x[3]);
}

// Bytes of an element of a gradient or output.
inline int size_of(Dtype dtype) {
    return dtype == Dtype::float32 ? 4 : 2;
}

// Whether elements from this one on are vectors of four.
inline bool is_vector(std::uint64_t address, std::int64_t first, Dtype dtype) {
    return (address + first * size_of(dtype)) % (4 * size_of(dtype)) == 0;
}

// Elements first..first+count of an array, count <= 8; the others keep what x holds.
inline void read_floats(const float* p, std::int64_t count, float (&x)[8]) {
    if (count == group && aligned(p, 16)) {
        const float4 low = reinterpret_cast<const float4*>(p)[0],
                     high = reinterpret_cast<const float4*>(p)[1];
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < count) x[i] = p[i];
}

inline void read_halves(const std::uint16_t* p, std::int64_t count, std::uint16_t (&x)[8]) {
    if (count == group && aligned(p, 16)) {
        const uint4 all = *reinterpret_cast<const uint4*>(p);
        const std::uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2)));
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < count) x[i] = p[i];
}

// To global memory. Of a plain store of a vector NVRTC may make one for each of its elements; __stcs stays
// what it is.
inline void write_floats(float* p, std::int64_t count, const float (&x)[8]) {
    if (count == group && aligned(p, 16)) {
        auto* const vectors = reinterpret_cast<float4*>(p);
        __stcs(vectors, make_float4(x[0], x[1], x[2], x[3]));
        __stcs(vectors + 1, make_float4(x[4], x[5], x[6], x[7]));
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < count) p[i] = x[i];
}

inline void write_halves(std::uint16_t* p, std::int64_t count, const std::uint16_t (&x)[8]) {
    if (count == group && aligned(p, 16)) {
        const uint4 all = make_uint4(
            x[0] | static_cast<std::uint32_t>(x[1]) << 16, x[2] | static_cast<std::uint32_t>(x[3]) << 16,
            x[4] | static_cast<std::uint32_t>(x[5]) << 16, x[6] | static_cast<std::uint32_t>(x[7]) << 16);
        __stcs(reinterpret_cast<uint4*>(p), all);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < count) p[i] = x[i];
}

// Elements that a team reads or writes together, eight per thread.
inline constexpr int strip = team_threads * group;

// What a team holds of a bucket in shared memory: all of one of 512 elements, which is read once.
inline constexpr int held = 4 * strip;
inline constexpr int vectors_of_stage = held / (4 * team_threads);

// A thread's vectors of four elements: those of a team are neighbours, one after another.
inline int place_of_vector(int i) {
    return i * team_threads + static_cast<int>(threadIdx.x) % team_threads;
}

// Elements in shared memory, a team's own. The second team of a warp has its halves of 32 elements swapped:
// what both read at a time lies in different banks. All places are a thread's own and a constant.
class Stage {
  public:
    explicit Stage(float4 (&own)[held / 4])
        : own_(reinterpret_cast<float*>(own)), swapped_(static_cast<int>(threadIdx.x) & 16) {}

    // A vector, see place_of_vector.
    float4* vector(int i) const { return four((4 * team_rank() ^ swapped_) + 4 * team_threads * i); }

    // The thread's eight elements of a strip.
    void read(int strip_begin, float (&x)[8]) const {
        const float4* const eight = four((group * team_rank() ^ swapped_) + strip_begin);
        const float4 low = eight[0], high = eight[1];
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }
    void write(int strip_begin, const float (&x)[8]) const {
        float4* const eight = four((group * team_rank() ^ swapped_) + strip_begin);
        eight[0] = make_float4(x[0], x[1], x[2], x[3]);
        eight[1] = make_float4(x[4], x[5], x[6], x[7]);
    }

    // Of 32 elements, the thread's one of the first and of the second half.
    void read_pair(int begin, float& first, float& second) const {
        const float* const pair = own_ + begin + team_rank();
        first = pair[swapped_], second = pair[16 - swapped_];
    }

  private:
    float4* four(int first) const { return reinterpret_cast<float4*>(own_ + first); }

    float* own_;
    int swapped_;
};

// Where in a strip of global memory a thread's eight begin. A vector holds four: for neighbours to access
// neighbouring ones, the threads of a pair take eight of the strip's first and of its second half, and swap
// one vector.
inline int place_in_strip() {
    const unsigned thread = threadIdx.x % 16;
    return static_cast<int>(8 * (thread / 2 + thread % 2 * 8));
}

// From a thread's vectors of a strip's halves to its own eight elements, and back.
inline void swap_vectors(float (&x)[8]) {
    const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(whole_warp, odd ? x[i] : x[4 + i], 1);
        x[i] = odd ? other : x[i];
        x[4 + i] = odd ? x[4 + i] : other;
    }
}

template <class T>
inline void load_vectors(const T* strip_begin, float (&x)[8], Dtype dtype = Dtype::float32) {
    const T* const own = strip_begin + 4 * (threadIdx.x % 16);
    const auto first = load_four(own), second = load_four(own + strip / 2);
    const float4 low = as_floats(first, dtype), high = as_floats(second, dtype);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

inline void store_vectors(float* strip_begin, const float (&x)[8]) {
    auto* const vectors = reinterpret_cast<float4*>(strip_begin) + threadIdx.x % 16;
    __stcs(vectors, make_float4(x[0], x[1], x[2], x[3]));
    __stcs(vectors + 16, make_float4(x[4], x[5], x[6], x[7]));
}

// A strip of an array that `left` elements follow from its begin on. The teams of a warp are at different
// strips of one array, a multiple of sixteen bytes apart; `least`: what is left for the second team. All
// threads of a warp go one way.
inline void write_strip(float* p, std::int64_t left, std::int64_t least, const float (&x)[8]) {
    if (least >= strip && aligned(p, 16)) {
        float y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = x[i];
        swap_vectors(y);
        store_vectors(p, y);
        return;
    }
    write_floats(p + place_in_strip(), smaller(group, left - place_in_strip()), x);
}

inline void read_strip(const float* p, std::int64_t left, std::int64_t least, float (&x)[8]) {
    if (least >= strip && aligned(p, 16)) {
        load_vectors(p, x);
        swap_vectors(x);
        return;
    }
    read_floats(p + place_in_strip(), smaller(group, left - place_in_strip()), x);
}

// Eight elements of a gradient as float32; zero where there is none.
inline void read_gradient(const Segment& segment, std::int64_t first, std::int64_t count, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = 0.0f;
    if (segment.gradient == 0) return;
    if (segment.dtype == Dtype::float32) return read_floats(at<float>(segment.gradient) + first, count, x);
    std::uint16_t half[8] = {};
    read_halves(at<std::uint16_t>(segment.gradient) + first, count, half);
    from_halves(half, segment.dtype, x);
}

// One element of it.
inline float gradient_at(const Segment& segment, std::int64_t i) {
    if (segment.gradient == 0) return 0.0f;
    if (segment.dtype == Dtype::float32) return at<float>(segment.gradient)[i];
    const I32 half = splat(static_cast<std::int32_t>(at<std::uint16_t>(segment.gradient)[i]));
    return (segment.dtype == Dtype::bfloat16 ? from_bfloat16(half) : from_half(half)).v;
}

// Eight outputs, in the row's dtype.
inline void write_output(const Segment& segment, std::int64_t first, std::int64_t count,
                         const float (&x)[8]) {
    if (segment.dtype == Dtype::float32) {
        write_floats(to<float>(segment.output) + first, count, x);
        return;
    }
    std::uint16_t half[8];
    to_halves(x, segment.dtype, half);
    write_halves(to<std::uint16_t>(segment.output) + first, count, half);
}

// A strip of them; `left` and `least` as above.
inline void write_output_strip(const Segment& segment, std::int64_t first, std::int64_t least,
                               const float (&x)[8]) {
    const std::int64_t left = segment.length - first;
    if (segment.dtype == Dtype::float32)
        write_strip(to<float>(segment.output) + first, left, least, x);
    else
        write_output(segment, first + place_in_strip(), smaller(group, left - place_in_strip()), x);
}

}  // namespace gradcomp::cuda
