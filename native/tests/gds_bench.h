// A GDS lane on the recording libcufile: two files, one buffer of host memory in the place of the GPU's, a clock that
// is stepped by hand. A bench that ends checks that nothing was used in a way that the real library doesn't allow.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "fakes/beside.h"
#include "fakes/fake_cufile.h"
#include "tutti/gds/lane.h"

namespace tutti::testing {

inline constexpr uint64_t kObject = 4096;
inline constexpr uint32_t kObjects = 64;

struct Fake {
  std::string library;
  decltype(&fake_cufile_reset) reset = nullptr;
  decltype(&fake_cufile_fail) fail = nullptr;
  decltype(&fake_cufile_entry) entry = nullptr;
  decltype(&fake_cufile_release) release = nullptr;
  decltype(&fake_cufile_limits) limits = nullptr;
  decltype(&fake_cufile_log) log = nullptr;
  decltype(&fake_cufile_alive) alive = nullptr;
  decltype(&fake_cufile_violations) violations = nullptr;

  void load() {
    setenv("CUFILE_LOGFILE_PATH", "/dev/null", 1);
    library = library_beside("fake_cufile");
    command(library, "fake_cufile_reset", reset);
    command(library, "fake_cufile_fail", fail);
    command(library, "fake_cufile_entry", entry);
    command(library, "fake_cufile_release", release);
    command(library, "fake_cufile_limits", limits);
    command(library, "fake_cufile_log", log);
    command(library, "fake_cufile_alive", alive);
    command(library, "fake_cufile_violations", violations);
  }
  [[nodiscard]] uint32_t calls(const std::string& name) const {
    const std::string text = log();
    uint32_t count = 0;
    for (size_t at = text.find(name + "("); at != std::string::npos; at = text.find(name + "(", at + 1)) {
      ++count;
    }
    return count;
  }
};
inline Fake fake;

inline int scratch_file(char first) {
  char path[] = "/tmp/tutti-gds-XXXXXX";
  const int fd = mkstemp(path);
  CHECK(fd >= 0 && unlink(path) == 0);
  std::string bytes(kObjects * kObject, '\0');
  for (uint64_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(first + static_cast<char>(i / kObject));
  }
  CHECK(pwrite(fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  return fd;
}

struct Bench {
  std::vector<int> fds{scratch_file('A'), scratch_file('a')};
  std::vector<unsigned char> memory = std::vector<unsigned char>(kObjects * kObject);
  Clock::time_point now = Clock::now();
  std::unique_ptr<GdsLane> lane;

  explicit Bench(uint32_t entries = 8, uint32_t batches = 2,
                 std::chrono::milliseconds grace = std::chrono::milliseconds(50)) {
    lane = std::make_unique<GdsLane>(fds, options(entries, batches, grace));
    lane->register_buffer(address(0), memory.size());
  }
  ~Bench() {
    lane.reset();
    for (const int fd : fds) {
      close(fd);
    }
    if (*fake.violations() != '\0') {
      std::fputs(fake.violations(), stderr);
    }
    CHECK(*fake.violations() == '\0');
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  GdsOptions options(uint32_t entries, uint32_t batches, std::chrono::milliseconds grace) {
    return {fake.library, entries, batches, grace, [this] { return now; }};
  }
  [[nodiscard]] uint64_t address(uint32_t object) const {
    return reinterpret_cast<uint64_t>(memory.data()) + object * kObject;
  }
  // Object i of a file <-> object i of memory.
  [[nodiscard]] GdsRequest request(uint32_t object, uint32_t file = 0, Direction direction = Direction::Read) const {
    return {1000 + object, file, direction, object * kObject, address(object), kObject};
  }
  [[nodiscard]] std::vector<GdsRequest> requests(uint32_t count) const {
    std::vector<GdsRequest> all;
    for (uint32_t object = 0; object < count; ++object) {
      all.push_back(request(object));
    }
    return all;
  }
  size_t submit(const std::vector<GdsRequest>& all) { return lane->submit(all, now + std::chrono::seconds(1)); }
  std::vector<GdsCompletion> poll() {
    std::vector<GdsCompletion> out(256);
    out.resize(lane->poll(out, std::chrono::microseconds(0)));
    return out;
  }
  // By tag; fails when one is told twice.
  std::map<uint64_t, GdsCompletion> results() {
    std::map<uint64_t, GdsCompletion> all;
    for (const GdsCompletion& completion : poll()) {
      CHECK(all.emplace(completion.tag, completion).second);
    }
    return all;
  }
  [[nodiscard]] bool holds(uint32_t object, char value) const {
    return std::all_of(memory.begin() + object * kObject, memory.begin() + (object + 1) * kObject,
                       [&](unsigned char byte) { return byte == static_cast<unsigned char>(value); });
  }
};

}  // namespace tutti::testing
