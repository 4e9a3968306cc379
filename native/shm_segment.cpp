// The segment's memory, its bells, and which processes live. Linux only: memfd, futex, /proc.

#include "shm_segment.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <fstream>
#include <limits>
#include <sstream>
#include <system_error>
#include <utility>

namespace gradcomp::shm {

namespace {

constexpr std::uint64_t magic = 0x31306d6873636767;  // "ggcshm01"
constexpr std::uint64_t page = 4096;
constexpr int most_ranks = 1024;

struct Header {
    std::uint64_t magic;
    std::uint64_t nonce;
    std::uint64_t size;
    std::uint64_t ring_bytes;
};

std::uint64_t pages(std::uint64_t bytes) {
    return (bytes + page - 1) / page * page;
}

std::uint64_t slots_at() {
    return page;
}
std::uint64_t positions_at(int size) {
    return slots_at() + pages(static_cast<std::uint64_t>(size) * sizeof(Slot));
}
// Heads, tails of rings to one rank, tails of rings to all.
std::uint64_t rings_at(int size) {
    const auto ranks = static_cast<std::uint64_t>(size);
    return positions_at(size) + pages(3 * ranks * ranks * sizeof(Position));
}

[[noreturn]] void fail(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

struct Status {
    char state;
    std::uint64_t start_ticks;
};

// The fields behind the program's name, which may hold anything.
bool read_status(std::int64_t process, Status& status) {
    std::ifstream file("/proc/" + std::to_string(process) + "/stat");
    std::string line;
    if (!std::getline(file, line)) return false;
    const auto name_end = line.rfind(')');
    if (name_end == std::string::npos) return false;
    std::istringstream fields(line.substr(name_end + 1));
    std::string skipped;
    fields >> status.state;
    for (int field = 4; field < 22; ++field) fields >> skipped;
    fields >> status.start_ticks;
    return !fields.fail();
}

class Descriptor {
  public:
    explicit Descriptor(int number) : number_(number) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (number_ >= 0) close(number_);
    }
    int get() const { return number_; }
    int release() { return std::exchange(number_, -1); }

  private:
    int number_;
};

}  // namespace

std::int64_t process_number() {
    return getpid();
}

Process Process::self() {
    Status status{};
    if (!read_status(getpid(), status)) throw std::runtime_error("/proc does not show this process");
    return {getpid(), status.start_ticks};
}

bool Process::lives() const {
    Status status{};
    return read_status(id, status) && status.start_ticks == start_ticks && status.state != 'Z' &&
           status.state != 'X';
}

std::uint64_t segment_bytes(int size, std::uint64_t ring_bytes) {
    return rings_at(size) + static_cast<std::uint64_t>(size) * static_cast<std::uint64_t>(size) * ring_bytes;
}

void check_geometry(int size, std::uint64_t ring_bytes) {
    if (size < 2 || size > most_ranks)
        throw std::invalid_argument("a segment is for 2 to " + std::to_string(most_ranks) + " ranks, not " +
                                    std::to_string(size));
    if (ring_bytes < page || ring_bytes > (1u << 30) || (ring_bytes & (ring_bytes - 1)) != 0)
        throw std::invalid_argument("a ring has a power of two of bytes from 4096 to 2^30, not " +
                                    std::to_string(ring_bytes));
}

Segment Segment::create(int size, std::uint64_t ring_bytes) {
    check_geometry(size, ring_bytes);
    Descriptor file(memfd_create("gradcomp", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (file.get() < 0) fail("memfd_create");
    const auto bytes = segment_bytes(size, ring_bytes);
    if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) fail("ftruncate");
    // All memory now: later, its lack would be a signal instead of an error.
    int error = 0;
    do error = posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
    while (error == EINTR);
    if (error != 0)
        throw std::system_error(error, std::generic_category(),
                                "no memory for a segment of " + std::to_string(bytes) + " bytes");
    // No rank can make it shorter under another's hands.
    if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("F_ADD_SEALS");

    Segment segment(file.release(), size, ring_bytes);
    Header header{magic, 0, static_cast<std::uint64_t>(size), ring_bytes};
    if (getrandom(&header.nonce, sizeof header.nonce, 0) != sizeof header.nonce) fail("getrandom");
    std::memcpy(segment.memory_, &header, sizeof header);
    segment.place_ = {Process::self(), segment.descriptor_, header.nonce};
    return segment;
}

Segment Segment::attach(const Place& place, int size, std::uint64_t ring_bytes) {
    check_geometry(size, ring_bytes);
    const std::string path =
        "/proc/" + std::to_string(place.creator.id) + "/fd/" + std::to_string(place.descriptor);
    Descriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.get() < 0) fail(("cannot open rank 0's segment, " + path).c_str());
    struct stat found{};
    if (fstat(file.get(), &found) != 0) fail("fstat");
    const int seals = fcntl(file.get(), F_GET_SEALS);
    if (found.st_uid != geteuid() || found.st_size != static_cast<off_t>(segment_bytes(size, ring_bytes)) ||
        seals < 0 || (seals & F_SEAL_SHRINK) == 0)
        throw std::runtime_error(path + " is not the segment of rank 0: another file, owner or size");

    Segment segment(file.release(), size, ring_bytes);
    Header header{};
    std::memcpy(&header, segment.memory_, sizeof header);
    if (header.magic != magic || header.nonce != place.nonce ||
        header.size != static_cast<std::uint64_t>(size) || header.ring_bytes != ring_bytes)
        throw std::runtime_error(path + " is not the segment of rank 0: another header");
    segment.place_ = place;
    return segment;
}

Segment::Segment(int descriptor, int size, std::uint64_t ring_bytes)
    : descriptor_(descriptor), size_(size), ring_bytes_(ring_bytes) {
    void* const mapped =
        mmap(nullptr, segment_bytes(size, ring_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) {
        const int error = errno;
        close(descriptor);
        throw std::system_error(error, std::generic_category(), "mmap");
    }
    memory_ = static_cast<std::byte*>(mapped);
    // A forked child is not a rank: it gets no copy of the mapping.
    madvise(mapped, segment_bytes(size, ring_bytes), MADV_DONTFORK);
}

Segment::Segment(Segment&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_),
      ring_bytes_(other.ring_bytes_),
      place_(other.place_),
      memory_(std::exchange(other.memory_, nullptr)) {}

Segment::~Segment() {
    shut();
    unmap();
}

void Segment::unmap() {
    if (memory_ != nullptr) munmap(std::exchange(memory_, nullptr), segment_bytes(size_, ring_bytes_));
}

void Segment::shut() {
    if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));
}

std::uint64_t Segment::pair(int from, int to) const {
    return static_cast<std::uint64_t>(from) * static_cast<std::uint64_t>(size_) +
           static_cast<std::uint64_t>(to);
}

Slot& Segment::slot(int rank) const {
    return reinterpret_cast<Slot*>(memory_ + slots_at())[rank];
}

Counter& Segment::head(int from, int to) const {
    return reinterpret_cast<Position*>(memory_ + positions_at(size_))[pair(from, to)].value;
}

Counter& Segment::tail(int from, int to, int reader) const {
    const auto all = pair(size_, 0);
    const auto at = from == to ? 2 * all + pair(from, reader) : all + pair(from, to);
    return reinterpret_cast<Position*>(memory_ + positions_at(size_))[at].value;
}

std::byte* Segment::ring(int from, int to) const {
    return memory_ + rings_at(size_) + pair(from, to) * ring_bytes_;
}

// Either the sleeper sees the bell or the ringer sees the sleeper: both write, then read, in one total order.
void ring_bell(Slot& slot, std::uint32_t reasons) {
    slot.bell.fetch_add(1, std::memory_order_seq_cst);
    if (reasons == always || (slot.asleep.load(std::memory_order_seq_cst) & reasons) != 0)
        syscall(SYS_futex, &slot.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void sleep_at_bell(Slot& slot, std::uint32_t heard, std::uint32_t reasons, std::int64_t most_milliseconds) {
    slot.asleep.store(reasons, std::memory_order_seq_cst);
    const timespec most{most_milliseconds / 1000, most_milliseconds % 1000 * 1000000};
    if (slot.bell.load(std::memory_order_seq_cst) == heard)
        syscall(SYS_futex, &slot.bell, FUTEX_WAIT, heard, &most, nullptr, 0);
    slot.asleep.store(0, std::memory_order_relaxed);
}

// Either the bell keeps it from sleeping or it is seen asleep, as above. Reading the bell last makes visible
// what was written by those who have rung it and still saw the old reasons.
void add_reasons(Slot& slot, std::uint32_t reasons) {
    slot.bell.fetch_add(1, std::memory_order_seq_cst);
    if (slot.asleep.load(std::memory_order_seq_cst) == 0) return;
    slot.asleep.fetch_or(reasons, std::memory_order_seq_cst);
    static_cast<void>(slot.bell.load(std::memory_order_seq_cst));
}

}  // namespace gradcomp::shm
