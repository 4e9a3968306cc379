// Moving messages through rings.

#include "shm_progress.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace gradcomp::shm {

namespace {

// Small enough to stay in the second-level cache on its way from one array to the next.
constexpr std::uint64_t largest_block = 64 * 1024;
// Partial sums of more than two ranks stay in the first-level cache.
constexpr std::uint64_t strip_bytes = 8 * 1024;

std::uint64_t item_bytes(Number number) {
    return number == Number::float32 ? sizeof(float) : sizeof(double);
}

template <class Float>
void add_two(const Float* a, const Float* b, Float* out, std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

// Rank 0's part plus rank 1's, plus rank 2's and so on; one of them is `out` itself.
template <class Float>
void add_parts(const std::vector<const std::byte*>& parts, std::byte* out_bytes, std::uint64_t bytes) {
    const auto part = [&](std::size_t rank) { return reinterpret_cast<const Float*>(parts[rank]); };
    auto* const out = reinterpret_cast<Float*>(out_bytes);
    const std::uint64_t count = bytes / sizeof(Float);
    if (parts.size() == 2) return add_two(part(0), part(1), out, count);
    alignas(64) Float partial[strip_bytes / sizeof(Float)];
    for (std::uint64_t at = 0; at < count; at += std::size(partial)) {
        const std::uint64_t strip = std::min<std::uint64_t>(std::size(partial), count - at);
        add_two(part(0) + at, part(1) + at, partial, strip);
        for (std::size_t rank = 2; rank + 1 < parts.size(); ++rank)
            add_two(partial, part(rank) + at, partial, strip);
        add_two(partial, part(parts.size() - 1) + at, out + at, strip);
    }
}

}  // namespace

Progress::Progress(const Segment& segment, int rank)
    : segment_(segment), rank_(rank), block_(std::min(largest_block, segment.ring_bytes() / 4)) {
    for (int peer = 0; peer < segment.size(); ++peer)
        outlets_.push_back({Writer(segment, rank, peer), {}, 0});
    for (int peer = 0; peer < segment.size(); ++peer)
        inlets_.push_back({Reader(segment, peer, rank, rank), {}});
    for (int peer = 0; peer < segment.size(); ++peer)
        inlets_.push_back({Reader(segment, peer, peer, rank), {}});
    parts_.resize(static_cast<std::size_t>(segment.size()));
}

void Progress::begin(std::shared_ptr<Operation> operation) {
    operation->unfinished = 1;
    if (operation->own) {
        copies_.push_back(operation.get());
        ++operation->unfinished;
    }
    for (Transfer& transfer : operation->sends) {
        outlet(transfer.peer).queue.push_back({operation.get(), &transfer});
        ++operation->unfinished;
    }
    for (Transfer& transfer : operation->receives) {
        const int inlet = transfer.peer + (transfer.to_all ? segment_.size() : 0);
        inlets_[static_cast<std::size_t>(inlet)].queue.push_back({operation.get(), &transfer});
        ++operation->unfinished;
    }
    if (operation->sum) sums_.push_back(operation->sum.get());
    operations_.push_back(operation);
    finish(*operation);
}

void Progress::finish(Operation& operation) {
    if (--operation.unfinished != 0) return;
    operation.state.store(State::done, std::memory_order_release);
    while (!operations_.empty() && operations_.front()->unfinished == 0) operations_.pop_front();
}

void Progress::give_up() {
    for (const auto& operation : operations_) {
        if (operation->unfinished != 0) operation->state.store(State::failed, std::memory_order_release);
    }
    for (Outlet& outlet : outlets_) outlet.queue.clear();
    for (Inlet& inlet : inlets_) inlet.queue.clear();
    sums_.clear();
    copies_.clear();
    operations_.clear();
}

bool Progress::pass(std::uint64_t most) {
    most = std::min(most, block_);
    const int size = segment_.size();
    bool moved = add(most);
    // From the next rank on: not all ranks at the same one.
    for (int step = 0; step < size; ++step) {
        const auto peer = static_cast<std::size_t>((rank_ + step) % size);
        moved |= receive(inlets_[peer + static_cast<std::size_t>(size)], most);
        moved |= send(outlets_[peer], most);
        moved |= receive(inlets_[peer], most);
    }
    return moved || copy();  // own parts last: nobody waits for them
}

bool Progress::copy() {
    if (copies_.empty()) return false;
    Operation& operation = *copies_.front();
    Copy& own = *operation.own;
    const std::uint64_t bytes = std::min(largest_block, own.length - own.done);
    std::memcpy(own.to + own.done, own.from + own.done, bytes);
    own.done += bytes;
    if (own.done == own.length) {
        copies_.pop_front();
        finish(operation);
    }
    return true;
}

bool Progress::send(Outlet& outlet, std::uint64_t most) {
    if (outlet.queue.empty()) return false;
    const auto [operation, transfer] = outlet.queue.front();
    Writer& writer = outlet.writer;
    const std::uint64_t before = writer.position();
    std::uint64_t position = before;
    std::uint64_t room = writer.room();
    if (!transfer->open) {
        const std::uint64_t start = next_message(position);
        const std::uint64_t needed = start + sizeof(MessageHeader) - position;
        if (room < needed) return false;
        const auto header = MessageHeader::of(operation->collective, transfer->length);
        std::memcpy(writer.at(start), &header, sizeof header);
        position += needed;
        room -= needed;
        transfer->open = true;
    }
    const std::uint64_t ready = transfer->sum != nullptr ? transfer->sum->done : transfer->length;
    const std::uint64_t bytes = std::min({ready - transfer->done, most, room, writer.contiguous(position)});
    std::memcpy(writer.at(position), transfer->data + transfer->done, bytes);
    transfer->done += bytes;
    position += bytes;
    if (position == before) return false;
    writer.publish(position);
    outlet.unannounced += position - before;
    const bool complete = transfer->done == transfer->length;
    // A reader that sleeps is woken for a quarter of the ring at least: on a busy processor, waking costs a
    // turn.
    if (complete || outlet.unannounced >= segment_.ring_bytes() / 4) announce(outlet);
    if (complete) {
        outlet.queue.pop_front();
        finish(*operation);
    }
    return true;
}

void Progress::announce(Outlet& outlet) {
    outlet.unannounced = 0;
    outlet.writer.for_each_reader([&](int reader) { ring_bell(segment_.slot(reader), for_bytes); });
}

// Takes the header of the next message in; false if it is not there yet.
bool Progress::open(Inlet& inlet) {
    const auto [operation, transfer] = inlet.queue.front();
    if (transfer->open) return true;
    Reader& reader = inlet.reader;
    const std::uint64_t start = next_message(reader.position());
    if (reader.available() < start + sizeof(MessageHeader) - reader.position()) return false;
    MessageHeader header{};
    std::memcpy(&header, reader.at(start), sizeof header);
    const int from = reader.from();
    const std::string who = "rank " + std::to_string(from);
    if (!header.sound()) throw Failure(from, who + "'s message is damaged in the shared memory");
    if (header.collective != operation->collective)
        throw Failure(from, who + " sent a message of collective " + std::to_string(header.collective) +
                                " where collective " + std::to_string(operation->collective) +
                                " is expected");
    if (header.length != transfer->length)
        throw Failure(from, who + " sent " + std::to_string(header.length) + " bytes in collective " +
                                std::to_string(header.collective) + ", rank " + std::to_string(rank_) +
                                " expects " + std::to_string(transfer->length));
    reader.advance(start + sizeof header);
    transfer->open = true;
    return true;
}

void Progress::read(Inlet& inlet, std::uint64_t bytes) {
    const auto [operation, transfer] = inlet.queue.front();
    inlet.reader.advance(inlet.reader.position() + bytes);
    transfer->done += bytes;
    // In quarters: a writer that waits for room is woken for more than a few bytes.
    if (inlet.reader.unpublished() >= segment_.ring_bytes() / 4) release(inlet);
    if (transfer->done == transfer->length) {
        inlet.queue.pop_front();
        finish(*operation);
    }
}

bool Progress::receive(Inlet& inlet, std::uint64_t most) {
    if (inlet.queue.empty() || inlet.queue.front().transfer->sum != nullptr || !open(inlet)) return false;
    const Transfer& transfer = *inlet.queue.front().transfer;
    const std::uint64_t position = inlet.reader.position();
    const std::uint64_t bytes = std::min(
        {transfer.length - transfer.done, most, inlet.reader.available(), inlet.reader.contiguous(position)});
    if (bytes == 0) return false;
    std::memcpy(transfer.data + transfer.done, inlet.reader.at(position), bytes);
    read(inlet, bytes);
    return true;
}

// Adds the next block that has arrived from all ranks.
bool Progress::add(std::uint64_t most) {
    if (sums_.empty()) return false;
    Sum& sum = *sums_.front();
    std::uint64_t bytes = std::min(most, sum.length - sum.done);
    const auto size = static_cast<std::size_t>(segment_.size());
    const auto own = static_cast<std::size_t>(rank_);
    for (std::size_t peer = 0; peer < size; ++peer) {
        if (peer == own) continue;
        Inlet& inlet = inlets_[peer];
        if (inlet.queue.empty() || inlet.queue.front().transfer->sum != &sum || !open(inlet)) return false;
        const std::uint64_t position = inlet.reader.position();
        bytes = std::min({bytes, inlet.reader.available(), inlet.reader.contiguous(position)});
        parts_[peer] = inlet.reader.at(position);
    }
    bytes -= bytes % item_bytes(sum.number);
    if (bytes == 0) return false;
    std::byte* const out = sum.own + sum.done;
    parts_[own] = out;
    if (sum.number == Number::float32)
        add_parts<float>(parts_, out, bytes);
    else
        add_parts<double>(parts_, out, bytes);
    sum.done += bytes;
    if (sum.done == sum.length) sums_.pop_front();
    for (std::size_t peer = 0; peer < size; ++peer) {
        if (peer != own) read(inlets_[peer], bytes);
    }
    return true;
}

void Progress::release(Inlet& inlet) {
    inlet.reader.publish();
    ring_bell(segment_.slot(inlet.reader.from()), for_room);
}

void Progress::announce() {
    for (Outlet& outlet : outlets_) {
        if (outlet.unannounced != 0) announce(outlet);
    }
    for (Inlet& inlet : inlets_) {
        if (inlet.reader.unpublished() != 0) release(inlet);
    }
}

bool Progress::needs(int rank) const {
    const auto peer = static_cast<std::size_t>(rank);
    const auto own = static_cast<std::size_t>(rank_);
    const Outlet& to_all = outlets_[own];
    const bool reads_to_all =
        !to_all.queue.empty() &&
        segment_.tail(rank_, rank_, rank).load(std::memory_order_acquire) != to_all.writer.position();
    return reads_to_all || !outlets_[peer].queue.empty() || !inlets_[peer].queue.empty() ||
           !inlets_[peer + static_cast<std::size_t>(segment_.size())].queue.empty();
}

std::uint32_t Progress::reasons_to_wake() const {
    std::uint32_t reasons = for_anything;
    const auto waits = [](const auto& end) { return !end.queue.empty(); };
    if (std::any_of(inlets_.begin(), inlets_.end(), waits)) reasons |= for_bytes;
    if (std::any_of(outlets_.begin(), outlets_.end(), waits)) reasons |= for_room;
    return reasons;
}

}  // namespace gradcomp::shm
