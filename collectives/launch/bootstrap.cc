#include "forebay/bootstrap.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>

#include "collectives/launch/launch_variables.h"
#include "collectives/launch/runtime_directory.h"

extern char** environ;

namespace forebay {
namespace {

using Variables = std::map<std::string, std::string>;

// The longest job name that is used as it is in a file name; a longer one is shortened and gets its hash.
constexpr std::size_t kJobNameMax = 96;

std::optional<std::string> find(const Variables& variables, const char* name) {
  const auto found = variables.find(name);
  // Shells unset a variable for a single command by making it empty.
  if (found == variables.end() || found->second.empty()) return std::nullopt;
  return found->second;
}

bool has(const Variables& variables, const char* name) {
  return find(variables, name).has_value();
}

Status invalid(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message));
}

// A non-negative whole number.
Result<int> number(const Variables& variables, const char* name) {
  const std::string text = find(variables, name).value_or("");
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    return invalid(std::string(name) + " is \"" + text +
                   "\", which is not a whole number of at least 0; look at the launcher that set it");
  }
  return value;
}

Status read_number(const Variables& variables, const char* name, int* value) {
  Result<int> read = number(variables, name);
  FOREBAY_RETURN_IF_ERROR(read.status());
  *value = read.value();
  return {};
}

// The variables in which a launcher gives these four numbers. Null: it does not give that one.
struct Names {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

Status check_range(const char* name, int value, int size, const char* size_name) {
  if (value < size) return {};
  return invalid(std::string(name) + " is " + std::to_string(value) + ", but " + size_name + " is " +
                 std::to_string(size) + "; ranks are 0 to " + std::to_string(size - 1));
}

Status read_names(const Variables& variables, const Names& names, LaunchEnvironment* environment) {
  for (const auto& [present, absent] :
       {std::pair(names.rank, names.size), std::pair(names.size, names.rank)}) {
    if (has(variables, present) && !has(variables, absent)) {
      return invalid(std::string(present) + " is set, but " + absent + " is not; set both or none");
    }
  }
  FOREBAY_RETURN_IF_ERROR(read_number(variables, names.rank, &environment->rank));
  FOREBAY_RETURN_IF_ERROR(read_number(variables, names.size, &environment->size));
  if (environment->size == 0)
    return invalid(std::string(names.size) + " is 0; a run needs at least one rank");
  FOREBAY_RETURN_IF_ERROR(check_range(names.rank, environment->rank, environment->size, names.size));

  const bool has_local_size = names.local_size != nullptr && has(variables, names.local_size);
  if (has_local_size) {
    FOREBAY_RETURN_IF_ERROR(read_number(variables, names.local_size, &environment->local_size));
    if (environment->local_size == 0 || environment->local_size > environment->size) {
      return invalid(std::string(names.local_size) + " is " + std::to_string(environment->local_size) +
                     ", but " + names.size + " is " + std::to_string(environment->size) +
                     "; it must be from 1 to that number");
    }
  }
  if (names.local_rank != nullptr && has(variables, names.local_rank)) {
    FOREBAY_RETURN_IF_ERROR(read_number(variables, names.local_rank, &environment->local_rank));
    const char* limit_name = has_local_size ? names.local_size : names.size;
    const int limit = has_local_size ? environment->local_size : environment->size;
    FOREBAY_RETURN_IF_ERROR(check_range(names.local_rank, environment->local_rank, limit, limit_name));
  }
  return {};
}

std::uint64_t hash(const std::string& text) {
  std::uint64_t value = 14695981039346656037u;  // FNV-1a
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return value;
}

// `job` as a file name; different jobs keep different names.
std::string job_name(const std::string& job) {
  std::string name = job;
  for (char& c : name) {
    const bool plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
    if (!plain) c = '_';
  }
  if (name == job && name.size() <= kJobNameMax) return name;
  name.resize(std::min(name.size(), kJobNameMax));
  return name + "-" + std::to_string(hash(job));
}

// The facts that a launcher gives about a job beside its ranks.
struct Job {
  std::string name;     // Unique among this user's jobs on this host; empty when nothing names the job.
  std::string address;  // The address of rank 0's host; empty when nothing gives it.
  bool has_pmix = false;
};

constexpr char kSecretAdvice[] =
    " and FOREBAY_SECRET_FILE to a secret that all hosts have (openssl rand -hex 32), or FOREBAY_STORE to a "
    "directory that all hosts share, new for each run";

// A rendezvous store at a port of rank 0's host.
Result<std::string> tcp_store(const Variables& variables, const Job& job) {
  int port = 0;
  FOREBAY_RETURN_IF_ERROR(read_number(variables, "FOREBAY_STORE_PORT", &port));
  if (port == 0 || port > 65535) {
    return invalid("FOREBAY_STORE_PORT is " + std::to_string(port) +
                   ", which is not a port; give one from 1 to 65535");
  }
  if (find(variables, "FOREBAY_STORE_PORT") == find(variables, "MASTER_PORT")) {
    return invalid("FOREBAY_STORE_PORT and MASTER_PORT are both " + std::to_string(port) +
                   ", where the launcher itself may listen; give another port");
  }
  const bool is_ipv6 = job.address.find(':') != std::string::npos;
  return "tcp://" + (is_ipv6 ? "[" + job.address + "]" : job.address) + ":" + std::to_string(port) + "/" +
         job_name(job.name);
}

// The rendezvous store for ranks on several hosts when FOREBAY_STORE is not set.
Result<std::string> store_across_hosts(const Variables& variables, const Job& job,
                                       const LaunchEnvironment& environment) {
  if (!job.address.empty() && has(variables, "FOREBAY_STORE_PORT")) return tcp_store(variables, job);
  if (job.has_pmix) return "pmix://" + job_name(job.name);
  const std::string how =
      job.address.empty()
          ? "set FOREBAY_STORE to tcp://HOST:PORT, with an address of rank 0's host and a port that is free "
            "there,"
          : "set FOREBAY_STORE_PORT to a port that is free on " + job.address +
                (has(variables, "MASTER_PORT") ? " (not MASTER_PORT, where the launcher may listen)" : "");
  return invalid(std::to_string(environment.size) + " ranks started by " + environment.launcher + ", " +
                 std::to_string(environment.local_size) + " of them on this host, need a place to meet; " +
                 how + kSecretAdvice);
}

// Fills in store and interface.
Status choose_store(const Variables& variables, const Job& job, LaunchEnvironment* environment) {
  environment->interface = find(variables, "FOREBAY_INTERFACE").value_or("");
  if (const auto given = find(variables, "FOREBAY_STORE")) {
    if (const std::size_t scheme = given->find("://");
        scheme != std::string::npos && !given->starts_with("tcp://") && !given->starts_with("pmix://")) {
      return invalid("FOREBAY_STORE is " + *given + ", but ranks cannot meet over " +
                     given->substr(0, scheme) +
                     "; set it to tcp://HOST:PORT or to a directory that every rank sees");
    }
    environment->store = *given;
    // The job tells this run from an earlier one, of which a rank may still look for the same port.
    const bool names_job = given->find('/', std::string_view("tcp://").size()) != std::string::npos;
    if (given->starts_with("tcp://") && !names_job && !job.name.empty())
      environment->store += "/" + job_name(job.name);
    return {};
  }
  if (environment->size == 1) return {};
  if (environment->local_size < environment->size) {
    Result<std::string> store = store_across_hosts(variables, job, *environment);
    FOREBAY_RETURN_IF_ERROR(store.status());
    environment->store = std::move(store).value();
    return {};
  }
  if (job.name.empty()) {
    return invalid(std::to_string(environment->size) + " ranks started by " + environment->launcher +
                   " need a place to meet, and nothing names this job; set FOREBAY_STORE to a directory that "
                   "all ranks see, new for each run");
  }
  environment->store = internal::runtime_directory(find(variables, "XDG_RUNTIME_DIR").value_or("")) +
                       "/forebay-" + std::to_string(geteuid()) + "/" + environment->launcher + "-" +
                       job_name(job.name);
  return {};
}

Result<LaunchEnvironment> read_forebay(const Variables& variables) {
  LaunchEnvironment environment{.launcher = "forebay"};
  FOREBAY_RETURN_IF_ERROR(read_names(
      variables, {"FOREBAY_RANK", "FOREBAY_SIZE", "FOREBAY_LOCAL_RANK", "FOREBAY_LOCAL_SIZE"}, &environment));
  // With variables set by hand, the ranks usually are on one host.
  if (!has(variables, "FOREBAY_LOCAL_SIZE")) environment.local_size = environment.size;
  if (!has(variables, "FOREBAY_LOCAL_RANK"))
    environment.local_rank = environment.rank % environment.local_size;
  FOREBAY_RETURN_IF_ERROR(choose_store(variables, {}, &environment));
  return environment;
}

// MASTER_PORT only becomes a part of the job's name: torchrun's own agent may listen there.
Result<LaunchEnvironment> read_torchrun(const Variables& variables) {
  LaunchEnvironment environment{.launcher = "torchrun"};
  FOREBAY_RETURN_IF_ERROR(
      read_names(variables, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, &environment));
  const std::optional<std::string> run = find(variables, "TORCHELASTIC_RUN_ID");
  const std::optional<std::string> port = find(variables, "MASTER_PORT");
  Job job{.address = find(variables, "MASTER_ADDR").value_or("")};
  if (run || port) {
    // Several jobs may have the default run id "none"; their ports differ.
    job.name = run.value_or("") + "." + find(variables, "MASTER_ADDR").value_or("") + "." +
               port.value_or("") + "." + find(variables, "TORCHELASTIC_RESTART_COUNT").value_or("0");
  }
  FOREBAY_RETURN_IF_ERROR(choose_store(variables, job, &environment));
  return environment;
}

Result<LaunchEnvironment> read_open_mpi(const Variables& variables) {
  LaunchEnvironment environment{.launcher = "open-mpi"};
  FOREBAY_RETURN_IF_ERROR(read_names(variables,
                                     {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                      "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
                                     &environment));
  Job job{.has_pmix = has(variables, "PMIX_NAMESPACE")};
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid", "OMPI_MCA_ess_base_jobid"}) {
    if (job.name.empty()) job.name = find(variables, name).value_or("");
  }
  FOREBAY_RETURN_IF_ERROR(choose_store(variables, job, &environment));
  return environment;
}

// MPICH's mpirun and similar ones. No variable names the job.
Result<LaunchEnvironment> read_mpich(const Variables& variables) {
  LaunchEnvironment environment{.launcher = "mpich"};
  FOREBAY_RETURN_IF_ERROR(
      read_names(variables, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}, &environment));
  FOREBAY_RETURN_IF_ERROR(choose_store(variables, {}, &environment));
  return environment;
}

// Slurm gives the number of nodes, but not the tasks of each node ("4(x2)" needs the list of nodes too). On
// one node all tasks are local.
Status read_slurm_locality(const Variables& variables, LaunchEnvironment* environment) {
  for (const char* name : {"SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"}) {
    if (!has(variables, name)) continue;
    int node_count = 0;
    FOREBAY_RETURN_IF_ERROR(read_number(variables, name, &node_count));
    if (node_count == 1) environment->local_size = environment->size;
    break;
  }
  if (has(variables, "SLURM_NTASKS_PER_NODE") && environment->local_size == 1) {
    FOREBAY_RETURN_IF_ERROR(read_number(variables, "SLURM_NTASKS_PER_NODE", &environment->local_size));
    environment->local_size = std::clamp(environment->local_size, 1, environment->size);
  }
  if (has(variables, "SLURM_LOCALID")) {
    FOREBAY_RETURN_IF_ERROR(read_number(variables, "SLURM_LOCALID", &environment->local_rank));
    FOREBAY_RETURN_IF_ERROR(
        check_range("SLURM_LOCALID", environment->local_rank, environment->size, "the number of tasks"));
    environment->local_size = std::max(environment->local_size, environment->local_rank + 1);
  }
  return {};
}

std::string slurm_job(const Variables& variables) {
  std::string job = find(variables, "SLURM_JOB_ID").value_or("");
  if (job.empty()) return job;
  for (const char* name : {"SLURM_STEP_ID", "SLURM_RESTART_COUNT"}) {
    job += "." + find(variables, name).value_or("0");
  }
  return job;
}

// The first host of the step, where task 0 runs: "node03" of "node[03-05,9],gpu1".
std::string first_slurm_host(const Variables& variables) {
  std::string list = find(variables, "SLURM_STEP_NODELIST").value_or("");
  if (list.empty()) list = find(variables, "SLURM_JOB_NODELIST").value_or("");
  const std::string prefix = list.substr(0, list.find_first_of("[,"));
  if (list.size() == prefix.size() || list[prefix.size()] == ',') return prefix;
  const std::size_t begin = prefix.size() + 1;
  return prefix + list.substr(begin, list.find_first_of("-,]", begin) - begin);
}

const char* slurm_size_name(const Variables& variables) {
  return has(variables, "SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
}

Result<LaunchEnvironment> read_pmix(const Variables& variables) {
  LaunchEnvironment environment{.launcher = "pmix"};
  const char* size_name = has(variables, "FOREBAY_SIZE") ? "FOREBAY_SIZE" : slurm_size_name(variables);
  if (!has(variables, size_name)) {
    return invalid("PMIX_RANK is set, but nothing tells the number of ranks; set FOREBAY_SIZE to it");
  }
  FOREBAY_RETURN_IF_ERROR(read_names(variables, {"PMIX_RANK", size_name, nullptr, nullptr}, &environment));
  FOREBAY_RETURN_IF_ERROR(read_slurm_locality(variables, &environment));
  const std::string name = find(variables, "PMIX_NAMESPACE").value_or("");
  FOREBAY_RETURN_IF_ERROR(choose_store(
      variables, {.name = name, .address = first_slurm_host(variables), .has_pmix = !name.empty()},
      &environment));
  return environment;
}

Result<LaunchEnvironment> read_slurm(const Variables& variables) {
  LaunchEnvironment environment{.launcher = "slurm"};
  FOREBAY_RETURN_IF_ERROR(
      read_names(variables, {"SLURM_PROCID", slurm_size_name(variables), nullptr, nullptr}, &environment));
  FOREBAY_RETURN_IF_ERROR(read_slurm_locality(variables, &environment));
  FOREBAY_RETURN_IF_ERROR(choose_store(
      variables, {.name = slurm_job(variables), .address = first_slurm_host(variables)}, &environment));
  return environment;
}

// A batch script without srun has SLURM_PROCID=0 and perhaps no number of tasks: it is one process, and not
// an incomplete launch.
bool started_by_slurm(const Variables& variables) {
  const std::optional<std::string> rank = find(variables, "SLURM_PROCID");
  return rank && (*rank != "0" || has(variables, slurm_size_name(variables)));
}

}  // namespace

Result<LaunchEnvironment> internal::read_launch_variables(const Variables& variables) {
  const bool pmix = has(variables, "PMIX_RANK");
  if (has(variables, "FOREBAY_RANK") || (has(variables, "FOREBAY_SIZE") && !pmix))
    return read_forebay(variables);
  if (has(variables, "RANK") || has(variables, "WORLD_SIZE")) return read_torchrun(variables);
  if (has(variables, "OMPI_COMM_WORLD_RANK") || has(variables, "OMPI_COMM_WORLD_SIZE")) {
    return read_open_mpi(variables);
  }
  if (pmix) return read_pmix(variables);
  // Slurm's pmi2 sets PMI_RANK too.
  if (has(variables, "PMI_RANK") && has(variables, "MPI_LOCALNRANKS")) return read_mpich(variables);
  if (started_by_slurm(variables)) return read_slurm(variables);
  LaunchEnvironment environment{.launcher = "none"};
  FOREBAY_RETURN_IF_ERROR(choose_store(variables, {}, &environment));
  return environment;
}

Result<LaunchEnvironment> read_launch_environment() {
  Variables variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::size_t equals = text.find('=');
    if (equals != std::string::npos) variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return internal::read_launch_variables(variables);
}

}  // namespace forebay
