// fio as a reference: the same bytes, block size and depth in its own file in the same directory, bypassing
// the page cache, by io_uring with registered files and buffers in huge pages. These must be reserved
// (/proc/sys/vm/nr_hugepages); without them it uses ordinary pages and says so.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "forebay/error.h"

namespace forebay::bench {

class Fio {
 public:
  Fio(const std::string& directory, std::size_t bytes, std::size_t block_bytes, unsigned depth)
      : file_(directory + "/.fio-" + std::to_string(::getpid())) {
    unsigned long reserved = 0;
    std::ifstream("/proc/sys/vm/nr_hugepages") >> reserved;
    const bool huge = reserved * (2u << 20) >= block_bytes * depth + (2u << 20);
    command_ =
        "fio --name=forebay --filename='" + file_ + "' --size=" + std::to_string(bytes) +
        " --bs=" + std::to_string(block_bytes) + " --iodepth=" + std::to_string(depth) +
        " --ioengine=io_uring --direct=1 --fixedbufs=1 --registerfiles=1 --overwrite=1 --fallocate=posix" +
        std::string(huge ? " --iomem=mmaphuge" : "") + " --output-format=json --rw=";
    if (!huge) std::printf("fio: no huge pages are reserved; its buffers are in ordinary ones\n");
  }
  ~Fio() { ::unlink(file_.c_str()); }
  Fio(const Fio&) = delete;
  Fio& operator=(const Fio&) = delete;

  static bool is_there() { return std::system("fio --version >/dev/null 2>&1") == 0; }

  struct Figures {
    double seconds = 0;
    double cpu_seconds = 0;
  };
  Figures run(bool write) const {
    std::FILE* pipe = ::popen((command_ + (write ? "write" : "read") + " 2>/dev/null").c_str(), "r");
    std::string text;
    char piece[4096];
    while (pipe != nullptr && !std::feof(pipe)) text.append(piece, std::fread(piece, 1, sizeof piece, pipe));
    if (pipe == nullptr || ::pclose(pipe) != 0)
      throw Error(StatusCode::kIoError, "fio failed; run it by hand: " + command_ + "read");
    const auto job = nlohmann::json::parse(text.substr(text.find('{'))).at("jobs").at(0);
    const auto& figures = job.at(write ? "write" : "read");
    const double seconds = figures.at("io_bytes").get<double>() / figures.at("bw_bytes").get<double>();
    return {seconds, seconds * (job.at("usr_cpu").get<double>() + job.at("sys_cpu").get<double>()) / 100};
  }

 private:
  std::string file_;
  std::string command_;
};

}  // namespace forebay::bench
