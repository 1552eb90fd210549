#include "forebay/bootstrap.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <limits>
#include <map>
#include <string_view>
#include <system_error>

#include "collectives/launch/launch_variables.h"
#include "collectives/launch/runtime_directory.h"
#include "forebay/text.h"

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

// Reads a whole number of at least 0.
Status read_number(const Variables& variables, const char* name, int* value) {
  const std::string text = find(variables, name).value_or("");
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) {
    return invalid_argument(name, " is \"", shown_value(text), "\", which is not a whole number from 0 to ",
                            std::numeric_limits<int>::max(), "; look at the launcher that set it");
  }
  *value = number;
  return {};
}

// The first of these variables that is set; empty if none is.
std::string first_of(const Variables& variables, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (const auto found = find(variables, name)) return *found;
  }
  return {};
}

// The variables in which a launcher gives these four numbers. Null: it does not give that one.
struct Names {
  const char* rank;
  const char* size;
  const char* local_rank = nullptr;
  const char* local_size = nullptr;
};

Status check_range(const char* name, int value, int size, const char* size_name) {
  if (value < size) return {};
  return invalid_argument(name, " is ", value, ", but ", size_name, " is ", size, "; ranks are 0 to ",
                          size - 1);
}

Status read_names(const Variables& variables, const Names& names, LaunchEnvironment* environment) {
  for (const auto& [present, absent] :
       {std::pair(names.rank, names.size), std::pair(names.size, names.rank)}) {
    if (has(variables, present) && !has(variables, absent)) {
      return invalid_argument(present, " is set, but ", absent, " is not; set both or none");
    }
  }
  FOREBAY_RETURN_IF_ERROR(read_number(variables, names.rank, &environment->rank));
  FOREBAY_RETURN_IF_ERROR(read_number(variables, names.size, &environment->size));
  if (environment->size == 0) return invalid_argument(names.size, " is 0; a run needs at least one rank");
  constexpr int kRanksMax = 100'000;  // The first rank writes some bytes for each into the store.
  if (environment->size > kRanksMax)
    return invalid_argument(names.size, " is ", environment->size, "; a run has at most ", kRanksMax,
                            " ranks");
  FOREBAY_RETURN_IF_ERROR(check_range(names.rank, environment->rank, environment->size, names.size));

  const bool has_local_size = names.local_size != nullptr && has(variables, names.local_size);
  if (has_local_size) {
    FOREBAY_RETURN_IF_ERROR(read_number(variables, names.local_size, &environment->local_size));
    if (environment->local_size == 0 || environment->local_size > environment->size) {
      return invalid_argument(names.local_size, " is ", environment->local_size, ", but ", names.size, " is ",
                              environment->size, "; it must be from 1 to that number");
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
  std::string name{};     // Unique among this user's jobs on this host; empty when nothing names the job.
  std::string address{};  // The address of rank 0's host; empty when nothing gives it.
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
    return invalid_argument("FOREBAY_STORE_PORT is ", port,
                            ", which is not a port; give one from 1 to 65535");
  }
  if (find(variables, "FOREBAY_STORE_PORT") == find(variables, "MASTER_PORT")) {
    return invalid_argument("FOREBAY_STORE_PORT and MASTER_PORT are both ", port,
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
  return invalid_argument(environment.size, " ranks started by ", environment.launcher, ", ",
                          environment.local_size, " of them on this host, need a place to meet; ", how,
                          kSecretAdvice);
}

// Fills in store and interface.
Status choose_store(const Variables& variables, const Job& job, LaunchEnvironment* environment) {
  environment->interface = find(variables, "FOREBAY_INTERFACE").value_or("");
  if (const auto given = find(variables, "FOREBAY_STORE")) {
    if (const std::size_t scheme = given->find("://");
        scheme != std::string::npos && !given->starts_with("tcp://") && !given->starts_with("pmix://")) {
      return invalid_argument("FOREBAY_STORE is ", shown_path(*given), ", but ranks cannot meet over ",
                              shown_value(given->substr(0, scheme)),
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
    FOREBAY_ASSIGN_OR_RETURN(environment->store, store_across_hosts(variables, job, *environment));
    return {};
  }
  if (job.name.empty()) {
    return invalid_argument(
        environment->size, " ranks started by ", environment->launcher,
        " need a place to meet, and nothing names this job; set FOREBAY_STORE to a directory that "
        "all ranks see, new for each run");
  }
  environment->store = internal::runtime_directory(find(variables, "XDG_RUNTIME_DIR").value_or("")) +
                       "/forebay-" + std::to_string(geteuid()) + "/" + environment->launcher + "-" +
                       job_name(job.name);
  return {};
}

// With variables set by hand, the ranks usually are on one host.
Status read_forebay_locality(const Variables& variables, LaunchEnvironment* environment) {
  if (!has(variables, "FOREBAY_LOCAL_SIZE")) environment->local_size = environment->size;
  if (!has(variables, "FOREBAY_LOCAL_RANK"))
    environment->local_rank = environment->rank % environment->local_size;
  return {};
}

// MASTER_PORT only becomes a part of the job's name: torchrun's own agent may listen there. Several jobs may
// have the default run id "none"; their ports differ.
Job torchrun_job(const Variables& variables) {
  Job job{.address = find(variables, "MASTER_ADDR").value_or("")};
  if (has(variables, "TORCHELASTIC_RUN_ID") || has(variables, "MASTER_PORT")) {
    job.name = find(variables, "TORCHELASTIC_RUN_ID").value_or("") + "." + job.address + "." +
               find(variables, "MASTER_PORT").value_or("") + "." +
               find(variables, "TORCHELASTIC_RESTART_COUNT").value_or("0");
  }
  return job;
}

Job open_mpi_job(const Variables& variables) {
  return {
      .name = first_of(variables, {"PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid", "OMPI_MCA_ess_base_jobid"}),
      .has_pmix = has(variables, "PMIX_NAMESPACE")};
}

Job flux_job(const Variables& variables) {
  return {.name = find(variables, "FLUX_JOB_ID").value_or("")};
}

Job pals_job(const Variables& variables) {
  return {.name = find(variables, "PALS_APID").value_or("")};
}

// The first of these variables that is set has the number of nodes. On one node all ranks are local.
Status read_nodes(const Variables& variables, std::initializer_list<const char*> names,
                  LaunchEnvironment* environment) {
  for (const char* name : names) {
    if (!has(variables, name)) continue;
    int node_count = 0;
    FOREBAY_RETURN_IF_ERROR(read_number(variables, name, &node_count));
    if (node_count == 1) environment->local_size = environment->size;
    break;
  }
  return {};
}

// Flux gives the number of nodes, but not the tasks of each node.
Status read_flux_locality(const Variables& variables, LaunchEnvironment* environment) {
  FOREBAY_RETURN_IF_ERROR(read_nodes(variables, {"FLUX_JOB_NNODES"}, environment));
  environment->local_size = std::max(environment->local_size, environment->local_rank + 1);
  return {};
}

// Slurm gives the number of nodes, but not the tasks of each node ("4(x2)" needs the list of nodes too).
Status read_slurm_locality(const Variables& variables, LaunchEnvironment* environment) {
  FOREBAY_RETURN_IF_ERROR(
      read_nodes(variables, {"SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"}, environment));
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

// The first host of the step, where task 0 runs: "node03" of "node[03-05,9],gpu1".
std::string first_slurm_host(const Variables& variables) {
  const std::string list = first_of(variables, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"});
  const std::string prefix = list.substr(0, list.find_first_of("[,"));
  if (list.size() == prefix.size() || list[prefix.size()] == ',') return prefix;
  const std::size_t begin = prefix.size() + 1;
  return prefix + list.substr(begin, list.find_first_of("-,]", begin) - begin);
}

const char* slurm_size_name(const Variables& variables) {
  return has(variables, "SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
}

Job pmix_job(const Variables& variables) {
  const std::string name = find(variables, "PMIX_NAMESPACE").value_or("");
  return {.name = name, .address = first_slurm_host(variables), .has_pmix = !name.empty()};
}

Job slurm_job(const Variables& variables) {
  Job job{.name = find(variables, "SLURM_JOB_ID").value_or(""), .address = first_slurm_host(variables)};
  for (const char* name : {"SLURM_STEP_ID", "SLURM_RESTART_COUNT"}) {
    if (!job.name.empty()) job.name += "." + find(variables, name).value_or("0");
  }
  return job;
}

// A batch script without srun has SLURM_PROCID=0 and perhaps no number of tasks: it is one process, and not
// an incomplete launch.
bool started_by_slurm(const Variables& variables) {
  const std::optional<std::string> rank = find(variables, "SLURM_PROCID");
  return rank && (*rank != "0" || has(variables, slurm_size_name(variables)));
}

// A launcher of several ranks whose variables do not count, so that each rank would train alone.
Status check_alone(const Variables& variables, const LaunchEnvironment& environment) {
  const bool is_meant = environment.launcher == "forebay" || has(variables, "TORCHELASTIC_RUN_ID");
  if (environment.size > 1 || is_meant) return {};
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "PMI_SIZE"}) {
    const std::string size = find(variables, name).value_or("1");
    if (size == "1") continue;
    return invalid_argument(
        name, " is ", shown_value(size),
        environment.launcher == "none" ? ", but nothing tells the rank's place on its host"
                                       : ", but the variables of " + environment.launcher + " say one rank",
        "; set FOREBAY_RANK, FOREBAY_SIZE, FOREBAY_LOCAL_RANK and FOREBAY_LOCAL_SIZE (a process that trains "
        "alone: FOREBAY_RANK=0 and FOREBAY_SIZE=1)");
  }
  return {};
}

struct Launcher {
  const char* name;
  bool is_present;
  Names names;
  Status (*read_locality)(const Variables&, LaunchEnvironment*);  // Null: `names` give it.
  Job (*job)(const Variables&);                                   // Null: nothing names the job.
};

}  // namespace

Result<LaunchEnvironment> internal::read_launch_variables(const Variables& variables) {
  const bool pmix = has(variables, "PMIX_RANK");
  const char* slurm_size = slurm_size_name(variables);
  const char* pmix_size = has(variables, "FOREBAY_SIZE") ? "FOREBAY_SIZE" : slurm_size;
  // The first that is present counts. Slurm's pmi2 sets PMI_RANK too.
  const Launcher launchers[] = {
      {"forebay",
       has(variables, "FOREBAY_RANK") || (has(variables, "FOREBAY_SIZE") && !pmix),
       {"FOREBAY_RANK", "FOREBAY_SIZE", "FOREBAY_LOCAL_RANK", "FOREBAY_LOCAL_SIZE"},
       read_forebay_locality,
       nullptr},
      {"torchrun",
       has(variables, "RANK") || has(variables, "WORLD_SIZE"),
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
       nullptr,
       torchrun_job},
      {"open-mpi",
       has(variables, "OMPI_COMM_WORLD_RANK") || has(variables, "OMPI_COMM_WORLD_SIZE"),
       {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE"},
       nullptr,
       open_mpi_job},
      {"mvapich",
       has(variables, "MV2_COMM_WORLD_RANK") || has(variables, "MV2_COMM_WORLD_SIZE"),
       {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE"},
       nullptr,
       nullptr},
      {"jsrun",
       has(variables, "JSM_NAMESPACE_RANK") || has(variables, "JSM_NAMESPACE_SIZE"),
       {"JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"},
       nullptr,
       open_mpi_job},
      // A batch script has some of Flux's variables; a task has both of these.
      {"flux",
       has(variables, "FLUX_TASK_RANK") && has(variables, "FLUX_JOB_SIZE"),
       {"FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"},
       read_flux_locality,
       flux_job},
      {"pmix", pmix, {"PMIX_RANK", pmix_size}, read_slurm_locality, pmix_job},
      {"mpich",
       has(variables, "PMI_RANK") && has(variables, "MPI_LOCALNRANKS"),
       {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
       nullptr,
       nullptr},
      {"pals",
       has(variables, "PMI_RANK") && has(variables, "PMI_LOCAL_SIZE"),
       {"PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"},
       nullptr,
       pals_job},
      {"slurm", started_by_slurm(variables), {"SLURM_PROCID", slurm_size}, read_slurm_locality, slurm_job},
  };
  LaunchEnvironment environment{.launcher = "none"};
  Job job;
  const auto launcher = std::find_if(std::begin(launchers), std::end(launchers),
                                     [](const Launcher& one) { return one.is_present; });
  if (launcher != std::end(launchers)) {
    environment.launcher = launcher->name;
    if (environment.launcher == "pmix" && !has(variables, pmix_size))
      return invalid_argument(
          "PMIX_RANK is set, but nothing tells the number of ranks; set FOREBAY_SIZE to it");
    FOREBAY_RETURN_IF_ERROR(read_names(variables, launcher->names, &environment));
    if (launcher->read_locality != nullptr)
      FOREBAY_RETURN_IF_ERROR(launcher->read_locality(variables, &environment));
    if (launcher->job != nullptr) job = launcher->job(variables);
  }
  FOREBAY_RETURN_IF_ERROR(check_alone(variables, environment));
  FOREBAY_RETURN_IF_ERROR(choose_store(variables, job, &environment));
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
