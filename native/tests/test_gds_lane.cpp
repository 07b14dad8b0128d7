// The GDS lane against the recording libcufile, which moves bytes between a file and host memory: order, bounds,
// requests and entries that fail, calls that fail.
#include "tutti/gds/lane.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "gds_bench.h"
#include "tutti/gds/cufile_abi.h"

using namespace tutti;
using std::chrono::milliseconds;
using testing::Bench;
using testing::fake;
using testing::kObject;
using testing::kObjects;

namespace {

void moves_bytes_both_ways() {
  fake.reset();
  {
    Bench bench;
    CHECK(bench.submit({bench.request(0), bench.request(3), bench.request(2, 1)}) == 3 && bench.lane->in_flight() == 3);
    const auto completions = bench.poll();
    CHECK(completions.size() == 3 && completions[0].tag == 1002 && completions[2].tag == 1000);  // reordered
    for (const GdsCompletion& completion : completions) {
      CHECK(completion.status == Status::Ok && completion.settled && completion.result == int64_t{kObject});
    }
    CHECK(bench.holds(0, 'A') && bench.holds(3, 'D') && bench.holds(2, 'c') && bench.holds(1, '\0'));
    std::fill_n(bench.memory.begin(), kObject, static_cast<unsigned char>('!'));
    CHECK(bench.submit({bench.request(0, 1, Direction::Write)}) == 1 && bench.results().at(1000).status == Status::Ok);
    std::string written(kObject, '\0');
    CHECK(pread(bench.fds[1], written.data(), kObject, 0) == ssize_t{kObject} && written == std::string(kObject, '!'));
    CHECK(bench.lane->in_flight() == 0 && fake.calls("cuFileBatchIOSetUp") == 2);  // the handles were used again
    CHECK(bench.lane->close() && fake.alive() == 0);
    const std::string log = fake.log();
    CHECK(log.find("cuFileBufRegister(262144,0)") != std::string::npos);
    const size_t end = log.find("cuFileBatchIODestroy");
    CHECK(end < log.find("cuFileBufDeregister") &&
          log.find("cuFileBufDeregister") < log.find("cuFileHandleDeregister"));
    CHECK(log.find("cuFileHandleDeregister") < log.find("cuFileDriverClose"));
    CHECK(bench.lane->close() && bench.submit({bench.request(1)}) == 1);
    CHECK(bench.results().at(1001).status == Status::BadState);
  }
  CHECK(fake.alive() == 0);
}

void batches_are_bounded() {
  fake.reset();
  fake.limits(3, 4);  // three events a call, four entries a batch
  Bench bench(128, 2);
  CHECK(bench.lane->batch_entries() == 4);
  std::vector<GdsRequest> all = bench.requests(20);
  std::map<uint64_t, GdsCompletion> told;
  for (int rounds = 0; !all.empty() || bench.lane->in_flight() != 0; ++rounds) {
    CHECK(rounds < 50);
    const size_t taken = bench.submit(all);
    CHECK(taken <= 4 && bench.lane->in_flight() <= 8);
    all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(taken));
    if (taken == 0) {
      told.merge(bench.results());
    }
  }
  told.merge(bench.results());
  CHECK(told.size() == 20 &&
        std::ranges::all_of(told, [](const auto& item) { return item.second.status == Status::Ok; }));
  for (uint32_t object = 0; object < 20; ++object) {
    CHECK(bench.holds(object, static_cast<char>('A' + object)));
  }
  CHECK(GdsLane(bench.fds, bench.options(1000, 1, milliseconds(1))).batch_entries() == 4);
  fake.limits(100, 500);
  CHECK(GdsLane(bench.fds, bench.options(1000, 1, milliseconds(1))).batch_entries() == kMaxGdsBatch);
}

void a_caller_that_never_polls_is_refused_in_time() {
  fake.reset();
  Bench bench(2, 2);
  GdsRequest wrong = bench.request(0);
  wrong.file = 7;
  size_t taken = 0;
  for (int i = 0; i < 100; ++i) {
    taken += bench.submit({wrong, wrong});
  }
  CHECK(taken == 7 || taken == 8);
  size_t told = 0;
  for (const GdsCompletion& completion : bench.poll()) {
    told += static_cast<size_t>(completion.status == Status::BadState);
  }
  CHECK(told == taken && bench.submit({bench.request(0)}) == 1 && bench.results().size() == 1);
}

void requests_that_cannot_be() {
  fake.reset();
  Bench bench;
  GdsRequest outside = bench.request(kObjects - 1);
  outside.address += 1;
  GdsRequest elsewhere = bench.request(1);
  elsewhere.address = 4096;
  GdsRequest nothing = bench.request(2);
  nothing.bytes = 0;
  GdsRequest far = bench.request(3);
  far.offset = UINT64_MAX - 100;
  GdsRequest file = bench.request(4);
  file.file = 2;
  CHECK(bench.submit({outside, elsewhere, nothing, far, file, bench.request(5)}) == 6);
  const auto told = bench.results();
  CHECK(told.size() == 6 && told.at(1005).status == Status::Ok && bench.holds(5, 'F'));
  CHECK(std::ranges::count_if(told, [](const auto& item) { return item.second.status == Status::BadState; }) == 5);
  for (const uint64_t skew : {uint64_t{0}, uint64_t{100}}) {
    bool refused = false;
    try {
      bench.lane->register_buffer(bench.address(0) + skew, kObject);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

void entries_that_fail() {
  struct Case {
    int fate;
    int64_t value;
    Status status;
  };
  const std::vector<Case> cases{{kFakeShort, 512, Status::ShortIo},
                                {kFakeShort, 0, Status::ShortIo},
                                {kFakeTooMuch, 0, Status::DeviceError},
                                {kFakeResult, -EIO, Status::DeviceError},
                                {kFakeResult, -ENOSPC, Status::NoSpace},
                                {kFakeResult, -EAGAIN, Status::Retry},
                                {kFakeResult, -5044, Status::DeviceError},
                                {kFakeResult, -5043, Status::Retry},
                                {kFakeResult, -5024, Status::BadState},
                                {kFakeResult, 0, Status::DeviceError},
                                {kFakeStatus, cufile::kInvalid, Status::BadState},
                                {kFakeStatus, cufile::kTimeout, Status::Timeout},
                                {kFakeStatus, cufile::kCanceled, Status::Cancelled},
                                {kFakeStatus, 0x4000, Status::DeviceError},
                                {kFakeTwice, 0, Status::Ok},
                                {kFakePending, 0, Status::Ok}};
  for (const Case& one : cases) {
    fake.reset();
    fake.entry(2, one.fate, one.value);
    {
      Bench bench;
      CHECK(bench.submit(bench.requests(3)) == 3);
      auto told = bench.results();
      told.merge(bench.results());
      CHECK(told.size() == 3 && told.at(1000).status == Status::Ok && told.at(1002).status == Status::Ok);
      CHECK(told.at(1001).status == one.status && told.at(1001).settled);
      CHECK(bench.submit(bench.requests(3)) == 3);  // the lane goes on
      told = bench.results();
      told.merge(bench.results());  // an event told twice takes the place of another's
      CHECK(told.size() == 3);
      const bool clean = one.status == Status::Ok;
      CHECK(fake.calls("cuFileBatchIOSetUp") == (clean ? 2 : 3));
      CHECK(bench.lane->in_flight() == 0 && bench.poll().empty());
    }
    CHECK(fake.alive() == 0);
  }
}

void calls_that_fail_while_running() {
  struct Case {
    const char* call;
    int code;
    Status status;
  };
  for (const Case& one :
       {Case{"cuFileBatchIOSubmit", 5035, Status::DeviceError}, Case{"cuFileBatchIOSubmit", 5040, Status::Retry},
        Case{"cuFileBatchIOSubmit", 5027, Status::BadState},
        Case{"cuFileBatchIOGetStatus", 5030, Status::DeviceError}}) {
    fake.reset();
    {
      Bench bench;
      fake.fail(one.call, 1, one.code);
      CHECK(bench.submit(bench.requests(3)) == 3);
      auto told = bench.results();
      told.merge(bench.results());
      CHECK(told.size() == 3 && bench.lane->in_flight() == 0);
      for (const auto& [tag, completion] : told) {
        CHECK(completion.status == one.status && completion.settled);
      }
      CHECK(fake.calls("cuFileBatchIOCancel") == 1 && fake.calls("cuFileBatchIODestroy") == 1);
      fake.fail("cuFileBatchIOSetUp", 1, 5039);  // a new handle is needed, and isn't to be had at first
      CHECK(bench.submit({bench.request(9)}) == 1 && bench.results().at(1009).status == Status::Retry);
      CHECK(bench.submit({bench.request(9)}) == 1 && bench.results().at(1009).status == Status::Ok);
    }
    CHECK(fake.alive() == 0);
  }
  fake.reset();
  Bench bench;
  fake.fail("cuFileBatchIOGetStatus", 1, 5041);  // "retry later": so it is
  CHECK(bench.submit(bench.requests(3)) == 3 && bench.poll().empty());
  CHECK(bench.results().size() == 3 && fake.calls("cuFileBatchIOCancel") == 0);
}

void each_step_of_opening_that_fails_undoes_those_before() {
  struct Case {
    const char* call;
    int nth;
    int code;
    const char* text;
  };
  for (const Case& one :
       {Case{"cuFileDriverOpen", 1, 5033, "cuFileDriverOpen failed: CU_FILE_NVFS_SETUP_ERROR (5033)"},
        Case{"cuFileHandleRegister", 1, 5027, "of file 0 failed: CU_FILE_HANDLE_NOT_REGISTERED (5027)"},
        Case{"cuFileHandleRegister", 2, 5008, "of file 1 failed: CU_FILE_IO_NOT_SUPPORTED (5008)"},
        Case{"cuFileBatchIOSetUp", 1, 5039,
             "cuFileBatchIOSetUp for 8 entries failed: CU_FILE_INTERNAL_BATCH_SETUP_ERR"},
        Case{"cuFileBatchIOSetUp", 2, 5021, "unknown cuFile error (5021)"},
        Case{"cuFileBufRegister", 1, 5011, "CU_FILE_CUDA_DRIVER_ERROR (5011), CUDA error 2"}}) {
    fake.reset();
    fake.fail(one.call, one.nth, one.code);
    try {
      const Bench bench;
      CHECK(!"opening failed");
    } catch (const std::runtime_error& error) {
      CHECK(std::string(error.what()).find(one.text) != std::string::npos);
    }
    CHECK(fake.alive() == 0);
  }
  try {
    const GdsLane lane({}, {"/nonexistent/libcufile.so.0", 8, 1, milliseconds(1), Clock::now});
    CHECK(!"a missing library was told");
  } catch (const std::runtime_error& error) {
    CHECK(std::string(error.what()).find("the cuFile library can't be used: /nonexistent") == 0);
  }
  fake.reset();
  fake.fail("cuFileDriverOpen", 1, cufile::kDriverAlreadyOpen);
  {
    Bench bench;  // somebody else's session
    CHECK(bench.submit({bench.request(0)}) == 1 && bench.results().at(1000).status == Status::Ok);
  }
  CHECK(fake.calls("cuFileDriverClose") == 0);
}

}  // namespace

int main() {
  fake.load();
  moves_bytes_both_ways();
  batches_are_bounded();
  a_caller_that_never_polls_is_refused_in_time();
  requests_that_cannot_be();
  entries_that_fail();
  calls_that_fail_while_running();
  each_step_of_opening_that_fails_undoes_those_before();
}
