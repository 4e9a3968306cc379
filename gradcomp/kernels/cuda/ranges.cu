// The codecs of buckets that encode.cu cannot hold, for one codec: GRADCOMP_CLASS. Codes follow in a kernel
// of encode.cu.
//
// A team reads a bucket of up to 8192 elements. Larger ones, whole layers among them, are cut into parts of
// 16 chunks, a block each; then a team joins what the blocks of a bucket have found. Where scales have a
// unit, a pass over all rows comes before.

#include "block.cuh"
#include "encode.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

inline void keep(const EncodeParams& params, const Job& job, const Class& codec) {
    job.write(params, codec);
    if (team_rank() == 0 && job.elements > 0)
        to<Class>(params.codecs)[at<std::int64_t>(params.codec_begins)[job.row] + job.bucket] = codec;
}

// --- a team for each bucket ---

template <class Source>
inline Class::Range range_of(const Source& source, const Job& job) {
    typename Class::Range range;
    const std::int64_t begin = job.begin, length = job.segment.length;
    const std::int64_t end = job.elements > 0 ? begin + job.elements : 0;  // nothing is read of no bucket
    if constexpr (order_free<typename Class::Range>) {
        for (std::int64_t first = begin / 8 * 8 + 8 * team_rank(); first < end; first += strip) {
            float c[8];
            source.read(first, smaller(group, length - first), c);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (first + i >= begin && first + i < end) range.add({c[i]});
        }
    } else {
        add_elements<ChunkPairs>(range, source, job.bucket, begin, job.elements, job.most);
    }
    return range;
}

template <class Source>
inline void find_ranges(const EncodeParams& params) {
    const Job job(params, Place(params.places, blockIdx.x));
    if (job.most <= 0) return;
    const Source source(params, job.segment);
    keep(params, job, Class(range_of(source, job), job.level(params), job.elements));
}

// --- a block for each part of a bucket ---

inline constexpr int chunks_of_part = teams;
inline constexpr std::int64_t part_elements = chunks_of_part * chunk_elements;

// How many parts a bucket has, the last one of a row too: blocks may find none of it left.
inline std::int64_t parts_of(const Segment& segment, std::int64_t bucket_size) {
    return (smaller(bucket_size, segment.length) + part_elements - 1) / part_elements;
}

// What takes the sum of a chunk from a range.
struct Leaf {
    double sum = 0.0;
    void add(double x) { sum = x; }
};

// What elements in order leave: sums, and a range of which any lane has all.
struct Part {
    Leaf sums[2];
    typename Class::Range range;
};

// The size that codes.py reserves, _KEPT_BYTES.
static_assert(sizeof(Part) <= 64);

// Add `count` elements from `begin` on, at most a chunk, by a team; `most`: of the warp's two teams. Its
// threads read a strip, of which each takes every sixteenth element by way of shared memory; the next strip
// is on its way meanwhile.
template <class Source>
inline void add_chunk(typename Class::Range& range, const Source& source, std::int64_t begin, int count,
                      int most, std::int64_t length) {
    __shared__ float strips_of_block[teams][strip + 16];
    float* const own = strips_of_block[threadIdx.x / team_threads];
    const int rank = team_rank();
    const std::int64_t origin = begin / 8 * 8;  // where groups begin that a source can read
    const auto skipped = static_cast<int>(begin - origin);
    float c[8] = {};
    const auto fetch = [&](int first) {
        const int place = first + 8 * rank;
        if (count > 0 && place < skipped + count)
            source.read(origin + place, smaller(group, length - origin - place), c);
    };
    fetch(0);
    for (int first = 0; first < skipped + most; first += strip) {
        __syncwarp();  // of the strip before
#pragma unroll
        for (int i = 0; i < 8; ++i) own[8 * rank + i] = c[i];
        __syncwarp();
        fetch(first + strip);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const int i = (rank + skipped) % 16 + 16 * k;
            if (first + i >= skipped && first + i < skipped + count) range.add({own[i]});
        }
    }
}

// The sum of the lanes of a team as a tree of neighbours, in all of them.
inline double tree_of_team(double x) {
#pragma unroll
    for (int distance = 1; distance < team_threads; distance *= 2)
        x = x + __shfl_down_sync(whole_warp, x, distance, team_threads);
    return __shfl_sync(whole_warp, x, 0, team_threads);
}

template <class Source>
inline void find_part(const EncodeParams& params) {
    __shared__ std::uint64_t found[teams][sizeof(Part) / 8];
    const Place place(params.places, blockIdx.x);
    const Segment& segment = at<Segment>(params.rows)[place.row];
    const Payload<Class> layout(segment);
    const std::int64_t parts = parts_of(segment, layout.bucket_size);
    const std::int64_t bucket = place.tile / parts;
    const std::int64_t origin = bucket * layout.bucket_size + place.tile % parts * part_elements;
    const std::int64_t end = smaller((bucket + 1) * layout.bucket_size, segment.length);
    const auto team = static_cast<int>(threadIdx.x) / team_threads;
    const std::int64_t begin = origin + team * chunk_elements;
    const auto left = [&](std::int64_t from) {
        return static_cast<int>(from < end ? smaller(chunk_elements, end - from) : 0);
    };
    const Source source(params, segment);
    Part part;
    add_chunk(part.range, source, begin, left(begin), left(origin + team / 2 * 2 * chunk_elements),
              segment.length);
    part.range.end_chunk(part.sums);
    part.range.gather();
    if (team_rank() == 0) std::memcpy(found[team], &part, sizeof part);
    __syncthreads();
    if (threadIdx.x >= 32) return;
    std::memcpy(&part, found[team_rank()], sizeof part);
    part.range.gather();
    for (Leaf& leaf : part.sums) leaf.sum = tree_of_team(leaf.sum);
    if (threadIdx.x == 0) to<Part>(params.parts)[blockIdx.x] = part;
}

inline void join(const EncodeParams& params) {
    const Job job(params, Place(params.places, blockIdx.x));
    if (job.most <= 0) return;
    const std::int64_t parts = parts_of(job.segment, job.layout.bucket_size);
    const Part* const found =
        at<Part>(params.parts) + at<std::int64_t>(params.part_begins)[job.row] + job.bucket * parts;
    typename Class::Range range;
    ChunkTrees trees;
    for (std::int64_t first = 0; first < parts; first += team_threads) {
        Part part;
        if (job.elements > 0 && first + team_rank() < parts) part = found[first + team_rank()];
        range.merge(part.range);
        if constexpr (!order_free<typename Class::Range>)
            for (int kind = 0; kind < 2; ++kind) trees[kind].add(tree_of_team(part.sums[kind].sum));
    }
    range.join(trees);
    keep(params, job, Class(range, job.level(params), job.elements));
}

// --- the largest magnitude of every row ---

// What a block reads of a row.
inline constexpr std::int64_t largest_elements = 8 * 256 * group;

// Bits of magnitudes ascend with them: blocks may come in any order.
template <class Source>
inline void find_largest(const EncodeParams& params) {
    const Place place(params.places, blockIdx.x);
    const Segment& segment = at<Segment>(params.rows)[place.row];
    const Source source(params, segment);
    const std::int64_t begin = std::int64_t{place.tile} * largest_elements;
    std::uint32_t largest = 0;
#pragma unroll 1
    for (std::int64_t first = begin + group * threadIdx.x; first < begin + largest_elements;
         first += 256 * group) {
        const int count = count_of(segment.length - first);
        float c[8] = {};
        if (count > 0) source.read(first, count, c);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const auto bits = static_cast<std::uint32_t>(magnitude_bits(F32{c[i]}).v);
            if (i < count) largest = bits > largest ? bits : largest;
        }
    }
    largest = reduce_block(largest, [](std::uint32_t a, std::uint32_t b) { return a > b ? a : b; });
    if (threadIdx.x == 0) atomicMax(to<std::uint32_t>(params.largest) + place.row, largest);
}

}  // namespace gradcomp::cuda

// The families of this source; modules.py lists which of them are compiled, and for what.
#define RANGES 1
#define PARTS 2
#define LARGEST 3

#if IN_MODULE(RANGES)
KERNEL(256, 2) encode_ranges(const EncodeParams __grid_constant__ params) {
    find_ranges<FromGradient>(params);
}
KERNEL(256, 2) reduce_ranges(const EncodeParams __grid_constant__ params) {
    find_ranges<FromPayloads<Class>>(params);
}
#endif

#if IN_MODULE(PARTS)
KERNEL(256, 2) encode_parts(const EncodeParams __grid_constant__ params) {
    find_part<FromGradient>(params);
}
KERNEL(256, 2) reduce_parts(const EncodeParams __grid_constant__ params) {
    find_part<FromPayloads<Class>>(params);
}
KERNEL(256, 2) join_parts(const EncodeParams __grid_constant__ params) {
    join(params);
}
#endif

#if IN_MODULE(LARGEST)
KERNEL(256, 2) encode_largest(const EncodeParams __grid_constant__ params) {
    find_largest<FromGradient>(params);
}
KERNEL(256, 2) reduce_largest(const EncodeParams __grid_constant__ params) {
    find_largest<FromPayloads<Class>>(params);
}
#endif
