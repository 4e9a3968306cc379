// A rank of a segment of shared memory.

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "shm.hpp"

namespace gradcomp::bindings {

namespace {

using Identity = std::tuple<std::int64_t, std::uint64_t>;                      // process, its start
using Location = std::tuple<std::int64_t, std::uint64_t, int, std::uint64_t>;  // process, start, file, nonce
using Location = std::tuple<std::int64_t, std::uint64_t, int, std::uint64_t>;  // process, start, file, nonce

struct ShmOperation {
    gradcomp::shm::Rank::Handle operation;

    int state() const { return static_cast<int>(operation->state.load(std::memory_order_acquire)); }
};

// One rank's hold on a segment. A forked child has neither the thread nor the mapping, and may touch nothing.
class ShmRank {
  public:
    ShmRank(gradcomp::shm::Segment segment, int rank)
        : segment_(std::make_unique<gradcomp::shm::Segment>(std::move(segment))), rank_number_(rank) {}
    ShmRank(const ShmRank&) = delete;
    ShmRank& operator=(const ShmRank&) = delete;
    ~ShmRank() {
        if (owner_.is_this_process()) {
            const nb::gil_scoped_release released;
            rank_.reset();
        } else {
            static_cast<void>(segment_.release());
            static_cast<void>(rank_.release());
        }
    }

    static std::unique_ptr<ShmRank> create(int size, std::uint64_t ring_bytes) {
        const nb::gil_scoped_release released;
        return std::make_unique<ShmRank>(gradcomp::shm::Segment::create(size, ring_bytes), 0);
    }

    static std::unique_ptr<ShmRank> attach(const Location& location, int rank, int size,
                                           std::uint64_t ring_bytes) {
        if (rank < 1 || rank >= size) throw std::invalid_argument("rank is not in 1 .. size - 1");
        const auto& [process, start, file, nonce] = location;
        const nb::gil_scoped_release released;
        return std::make_unique<ShmRank>(
            gradcomp::shm::Segment::attach({{process, start}, file, nonce}, size, ring_bytes), rank);
    }

    Location location() const {
        const auto place = unstarted().place();
        return {place.creator.id, place.creator.start_ticks, place.descriptor, place.nonce};
    }

    void start(const std::vector<Identity>& identities) {
        if (identities.size() != static_cast<std::size_t>(unstarted().size()))
            throw std::invalid_argument("there is not one process for each rank");
        std::vector<gradcomp::shm::Process> processes;
        for (const auto& [process, start] : identities) processes.push_back({process, start});
        const auto segment = std::move(segment_);
        const nb::gil_scoped_release released;
        size_ = segment->size();
        rank_ =
            std::make_unique<gradcomp::shm::Rank>(std::move(*segment), rank_number_, std::move(processes));
    }

    ShmOperation allreduce(const nb::ndarray<nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>& array) {
        using gradcomp::shm::Number;
        const bool is_float32 = array.dtype() == nb::dtype<float>();
        if (!is_float32 && array.dtype() != nb::dtype<double>())
            throw std::invalid_argument("array is neither float32 nor float64");
        if (reinterpret_cast<std::uintptr_t>(array.data()) % array.itemsize() != 0)
            throw std::invalid_argument("array is not aligned");
        return {started().allreduce(is_float32 ? Number::float32 : Number::float64,
                                    static_cast<std::byte*>(array.data()), array.size())};
    }

    ShmOperation alltoallv(const ConstBytes& send, const std::vector<std::int64_t>& send_counts,
                           const Bytes& recv, const std::vector<std::int64_t>& recv_counts) {
        auto& rank = started();
        const auto sends = cut("send", send_counts, const_cast<std::uint8_t*>(send.data()), send.size());
        const auto receives = cut("recv", recv_counts, recv.data(), recv.size());
        const auto own = static_cast<std::size_t>(rank_number_);
        if (send_counts[own] != recv_counts[own])
            throw std::invalid_argument("the own parts of send and recv differ in length");
        return {rank.exchange(sends, receives)};
    }

    ShmOperation allgatherv(const Bytes& buffer, const std::vector<std::int64_t>& counts) {
        auto& rank = started();
        return {rank.allgather(cut("buffer", counts, buffer.data(), buffer.size()))};
    }

    ShmOperation exchange(const std::vector<int>& send_ranks, const std::vector<ConstBytes>& sends,
                          const std::vector<int>& recv_ranks, const std::vector<Bytes>& recvs) {
        auto& rank = started();
        check_peers(send_ranks, sends.size());
        check_peers(recv_ranks, recvs.size());
        std::vector<gradcomp::shm::Part> out, in;
        for (std::size_t i = 0; i < sends.size(); ++i)
            out.push_back({send_ranks[i],
                           reinterpret_cast<std::byte*>(const_cast<std::uint8_t*>(sends[i].data())),
                           sends[i].size()});
        for (std::size_t i = 0; i < recvs.size(); ++i)
            in.push_back({recv_ranks[i], reinterpret_cast<std::byte*>(recvs[i].data()), recvs[i].size()});
        return {rank.exchange(out, in)};
    }

    void help() { started().help(); }
    std::string failure() { return started().failure(); }
    void abandon() { started().abandon(); }
    void close() {
        if (!owner_.is_this_process()) return;
        segment_.reset();
        const nb::gil_scoped_release released;
        if (rank_) rank_->close();
    }

  private:
    class Owner {
      public:
        bool is_this_process() const { return gradcomp::shm::process_number() == number_; }
        void check() const {
            if (!is_this_process())
                throw std::runtime_error(
                    "the shared memory belongs to the process that this one was forked from");
        }

      private:
        std::int64_t number_ = gradcomp::shm::process_number();
    };

    gradcomp::shm::Segment& unstarted() const {
        owner_.check();
        if (!segment_) throw std::runtime_error("the rank has been started or closed");
        return *segment_;
    }

    gradcomp::shm::Rank& started() const {
        owner_.check();
        if (!rank_) throw std::runtime_error("the rank has not been started");
        return *rank_;
    }

    // The parts of a buffer, consecutive, for every rank.
    std::vector<gradcomp::shm::Part> cut(const char* name, const std::vector<std::int64_t>& counts,
                                         std::uint8_t* data, std::size_t length) const {
        if (counts.size() != static_cast<std::size_t>(size_))
            throw std::invalid_argument(std::string(name) + " has " + std::to_string(counts.size()) +
                                        " counts for " + std::to_string(size_) + " ranks");
        std::vector<gradcomp::shm::Part> parts;
        auto* at = reinterpret_cast<std::byte*>(data);
        std::uint64_t left = length;
        for (int rank = 0; rank < size_; ++rank) {
            const std::int64_t count = counts[static_cast<std::size_t>(rank)];
            if (count < 0 || static_cast<std::uint64_t>(count) > left)
                throw std::invalid_argument(std::string(name) + " does not hold the parts that are counted");
            parts.push_back({rank, at, static_cast<std::uint64_t>(count)});
            at += count;
            left -= static_cast<std::uint64_t>(count);
        }
        return parts;
    }

    void check_peers(const std::vector<int>& ranks, std::size_t arrays) const {
        if (ranks.size() != arrays) throw std::invalid_argument("there is not one array for each rank");
        std::vector<bool> seen(static_cast<std::size_t>(size_));
        for (const int rank : ranks) {
            if (rank < 0 || rank >= size_ || rank == rank_number_ || seen[static_cast<std::size_t>(rank)])
                throw std::invalid_argument("rank " + std::to_string(rank) +
                                            " is no other rank, or is named twice");
            seen[static_cast<std::size_t>(rank)] = true;
        }
    }

    Owner owner_;
    std::unique_ptr<gradcomp::shm::Segment> segment_;
    std::unique_ptr<gradcomp::shm::Rank> rank_;
    int rank_number_;
    int size_ = 0;
};

Identity shm_process() {
    const auto process = gradcomp::shm::Process::self();
    return {process.id, process.start_ticks};
}

}  // namespace

void add_shared_memory(nb::module_& module) {
    nb::class_<ShmOperation>(module, "ShmOperation").def("state", &ShmOperation::state);
    nb::class_<ShmRank>(module, "ShmRank")
        .def_static("create", &ShmRank::create, "size"_a, "ring_bytes"_a)
        .def_static("attach", &ShmRank::attach, "location"_a, "rank"_a, "size"_a, "ring_bytes"_a)
        .def("location", &ShmRank::location)
        .def("start", &ShmRank::start, "processes"_a)
        .def("allreduce", &ShmRank::allreduce, array("array"))
        .def("alltoallv", &ShmRank::alltoallv, array("send"), "send_counts"_a, array("recv"), "recv_counts"_a)
        .def("allgatherv", &ShmRank::allgatherv, array("buffer"), "counts"_a)
        .def("exchange", &ShmRank::exchange, "send_ranks"_a, array("sends"), "recv_ranks"_a, array("recvs"))
        .def("help", &ShmRank::help)
        .def("failure", &ShmRank::failure)
        .def("abandon", &ShmRank::abandon)
        .def("close", &ShmRank::close);
    module.def("shm_process", &shm_process);
    module.def("shm_bytes", &gradcomp::shm::segment_bytes, "size"_a, "ring_bytes"_a);
}

}  // namespace gradcomp::bindings
