// The SM partition against the recording libcuda: the calls and their arguments, and that whatever fails, all that was
// made before is given back.
#include "tutti/gpu/partition.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "fakes/beside.h"
#include "fakes/fake_cuda.h"

using namespace tutti;

namespace {

constexpr int kOutOfMemory = 2;

struct Fake {
  std::string library;
  decltype(&fake_cuda_reset) reset = nullptr;
  decltype(&fake_cuda_device) device = nullptr;
  decltype(&fake_cuda_fail) fail = nullptr;
  decltype(&fake_cuda_without) without = nullptr;
  decltype(&fake_cuda_log) log = nullptr;
  decltype(&fake_cuda_alive) alive = nullptr;

  void load() {
    library = testing::library_beside("fake_cuda");
    testing::command(library, "fake_cuda_reset", reset);
    testing::command(library, "fake_cuda_device", device);
    testing::command(library, "fake_cuda_fail", fail);
    testing::command(library, "fake_cuda_without", without);
    testing::command(library, "fake_cuda_log", log);
    testing::command(library, "fake_cuda_alive", alive);
  }
};
Fake fake;

PartitionOptions options(uint32_t io_sms = 8, int device = 0) { return {device, io_sms, fake.library}; }

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string refusal(const PartitionOptions& wanted) {
  try {
    const SmPartition partition(wanted);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  CHECK(!"refused");
  return {};
}

void splits_in_the_documented_order() {
  fake.reset();
  {
    SmPartition partition(options());
    CHECK(partition.kind() == PartitionKind::Green && partition.reason().empty());
    CHECK(partition.io_sms() == 8 && partition.compute_sms() == 124 && partition.device_sms() == 132);
    CHECK(partition.io_stream() != 0 && partition.compute_stream() != 0);
    CHECK(partition.io_stream() != partition.compute_stream());
    CHECK(std::string(fake.log()) ==
          "cuInit(0)\n"
          "cuDeviceGetCount()\n"
          "cuDeviceGet(0)\n"
          "cuDeviceGetAttribute(16,40)\n"
          "cuDevicePrimaryCtxRetain(40)\n"
          "cuCtxPushCurrent(119)\n"
          "cuCtxGetStreamPriorityRange()\n"
          "cuDeviceGetDevResource(40,1)\n"
          "cuDevSmResourceSplitByCount(1,132,0,8)\n"
          "cuDevResourceGenerateDesc(8,1)\n"
          "cuGreenCtxCreate(8,40,1)\n"
          "cuGreenCtxStreamCreate(8,1,-5)\n"
          "cuDevResourceGenerateDesc(124,1)\n"
          "cuGreenCtxCreate(124,40,1)\n"
          "cuGreenCtxStreamCreate(124,1,0)\n"
          "cuCtxPopCurrent()\n");
    const std::string before = fake.log();
    CHECK(partition.close().empty() && partition.io_stream() == 0 && partition.compute_sms() == 0);
    const std::string closing = std::string(fake.log()).substr(before.size());
    const std::vector<std::string> order{"cuStreamSynchronize",          "cuStreamDestroy", "cuGreenCtxDestroy(124)",
                                         "cuStreamSynchronize",          "cuStreamDestroy", "cuGreenCtxDestroy(8)",
                                         "cuDevicePrimaryCtxRelease(40)"};
    size_t at = 0;
    for (const std::string& step : order) {
      at = closing.find(step, at);
      CHECK(at != std::string::npos);
      at += step.size();
    }
    const std::string once = fake.log();
    CHECK(partition.close().empty() && once == fake.log());
  }
  CHECK(fake.alive() == 0);
}

void other_sizes_and_devices() {
  fake.reset();
  fake.device(2, 132, 8, 8, 9, 13000);
  const SmPartition partition(options(16, 1));
  CHECK(partition.io_sms() == 16 && partition.compute_sms() == 116);
  CHECK(contains(fake.log(), "cuDeviceGet(1)") && contains(fake.log(), "cuDevicePrimaryCtxRetain(41)"));
}

void impossible_requests_say_what_is_possible() {
  for (const uint32_t io_sms : {0U, 4U, 12U, 128U, 1000U}) {
    fake.reset();
    CHECK(contains(refusal(options(io_sms)), "132 SMs the I/O domain can have 8 to 120 in steps of 8"));
    CHECK(fake.alive() == 0);
  }
  fake.reset();
  CHECK(contains(refusal(options(8, 3)), "device 3 isn't there: this process sees 1 NVIDIA GPU(s)"));
  CHECK(contains(refusal(options(8, -1)), "device -1 isn't there"));
  CHECK(fake.alive() == 0);
}

void an_older_driver_tells_no_granularity() {
  fake.reset();
  fake.device(1, 108, 0, 0, 8, 12060);
  CHECK(contains(refusal(options(5)), "can have 4 to 104 in steps of 2"));
  fake.reset();
  fake.device(1, 132, 0, 0, 9, 12060);
  const SmPartition partition(options());
  CHECK(partition.kind() == PartitionKind::Green && partition.compute_sms() == 124);
}

void falls_back(const std::string& reason) {
  {
    const SmPartition partition(options());
    CHECK(partition.kind() == PartitionKind::Priority && contains(partition.reason(), reason));
    CHECK(partition.io_stream() != 0 && partition.compute_stream() == 0);
    CHECK(partition.io_sms() == 0 && partition.compute_sms() == 0);
    CHECK(contains(fake.log(), "cuStreamCreateWithPriority(1,-5)\n"));
    CHECK(fake.alive() == 2);  // the stream and the retain
  }
  CHECK(fake.alive() == 0);
}

void a_lesser_driver_or_device_gets_a_priority_stream() {
  fake.reset();
  fake.device(1, 132, 8, 8, 9, 12030);
  falls_back("(CUDA 12.3) has no green contexts, which need CUDA 12.5: cuDeviceGetDevResource, ");
  fake.reset();
  fake.device(1, 132, 8, 8, 9, 12040);
  falls_back("cuGreenCtxStreamCreate not found");
  fake.reset();
  fake.without("cuDevSmResourceSplitByCount");
  falls_back("cuDevSmResourceSplitByCount not found");
  fake.reset();
  fake.device(1, 14, 8, 8, 9, 13000);
  falls_back("too small: of its 14 SMs two parts would need 8 each");
}

void each_step_that_fails_undoes_those_before() {
  const std::vector<std::pair<const char*, int>> steps{
      {"cuDeviceGetDevResource", 1}, {"cuDevSmResourceSplitByCount", 1}, {"cuDevResourceGenerateDesc", 1},
      {"cuGreenCtxCreate", 1},       {"cuGreenCtxStreamCreate", 1},      {"cuDevResourceGenerateDesc", 2},
      {"cuGreenCtxCreate", 2},       {"cuGreenCtxStreamCreate", 2}};
  for (const auto& [name, call] : steps) {
    fake.reset();
    fake.fail(name, call, kOutOfMemory);
    falls_back(std::string(name) + " failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory");
    fake.reset();
    fake.fail(name, call, kOutOfMemory);
    fake.fail("cuStreamCreateWithPriority", 1, 999);
    const SmPartition partition(options());
    CHECK(partition.kind() == PartitionKind::None && partition.io_stream() == 0);
    CHECK(contains(partition.reason(), name) &&
          contains(partition.reason(), "cuStreamCreateWithPriority failed: unknown CUDA error (999)"));
    CHECK(fake.alive() == 0);
  }
}

void without_a_gpu_there_is_a_reason() {
  fake.reset();
  fake.device(0, 132, 8, 8, 9, 13000);
  const SmPartition none(options());
  CHECK(none.kind() == PartitionKind::None &&
        contains(none.reason(), "no NVIDIA GPU: cuInit failed: CUDA_ERROR_NO_DEV"));
  const SmPartition missing({0, 8, "/nonexistent/libcuda.so.1"});
  CHECK(missing.kind() == PartitionKind::None && contains(missing.reason(), "no NVIDIA driver: /nonexistent"));
  const SmPartition stranger({0, 8, "libc.so.6"});
  CHECK(contains(stranger.reason(), "older than CUDA 12.0"));
  for (const char* name :
       {"cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxGetStreamPriorityRange"}) {
    fake.reset();
    fake.fail(name, 1, kOutOfMemory);
    SmPartition partition(options());
    CHECK(partition.kind() == PartitionKind::None && contains(partition.reason(), name));
    CHECK(fake.alive() == 0 && partition.close().empty());
  }
  fake.reset();
  fake.fail("cuCtxPushCurrent", 1, kOutOfMemory);
  const SmPartition contextless(options());
  CHECK(contextless.kind() == PartitionKind::None && fake.alive() == 0);
  fake.reset();
  fake.without("cuStreamDestroy");
  const SmPartition partial(options());
  CHECK(contains(partial.reason(), "hasn't got cuStreamDestroy"));
}

void closing_reports_the_first_error_and_goes_on() {
  fake.reset();
  SmPartition partition(options());
  fake.fail("cuStreamSynchronize", 1, kOutOfMemory);
  fake.fail("cuDevicePrimaryCtxRelease", 1, 999);
  CHECK(contains(partition.close(), "cuStreamSynchronize failed: CUDA_ERROR_OUT_OF_MEMORY"));
  CHECK(fake.alive() == 1);  // the retain that it refused to give back
}

}  // namespace

int main() {
  fake.load();
  splits_in_the_documented_order();
  other_sizes_and_devices();
  impossible_requests_say_what_is_possible();
  an_older_driver_tells_no_granularity();
  a_lesser_driver_or_device_gets_a_priority_stream();
  each_step_that_fails_undoes_those_before();
  without_a_gpu_there_is_a_reason();
  closing_reports_the_first_error_and_goes_on();
}
