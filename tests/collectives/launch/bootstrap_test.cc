#include "forebay/bootstrap.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "collectives/launch/launch_variables.h"
#include "tests/support/temporary_directory.h"

namespace forebay {
namespace {

using Variables = std::map<std::string, std::string>;

struct Good {
  const char* name;
  Variables variables;
  LaunchEnvironment expected;
};

std::string derived(const std::string& launcher, const std::string& job) {
  return "/tmp/forebay-" + std::to_string(geteuid()) + "/" + launcher + "-" + job;
}

TEST(LaunchEnvironment, ReadsEveryLauncher) {
  const std::vector<Good> cases = {
      {"none", {}, {.launcher = "none"}},
      {"none with a store", {{"FOREBAY_STORE", "/s"}}, {.launcher = "none", .store = "/s"}},
      {"forebay",
       {{"FOREBAY_RANK", "2"},
        {"FOREBAY_SIZE", "4"},
        {"FOREBAY_LOCAL_RANK", "0"},
        {"FOREBAY_LOCAL_SIZE", "2"},
        {"FOREBAY_STORE", "/s"}},
       {"forebay", 2, 4, 0, 2, "/s"}},
      {"forebay by hand on one host",
       {{"FOREBAY_RANK", "2"}, {"FOREBAY_SIZE", "4"}, {"FOREBAY_STORE", "/s"}},
       {"forebay", 2, 4, 2, 4, "/s"}},
      {"forebay before torchrun",
       {{"FOREBAY_RANK", "1"},
        {"FOREBAY_SIZE", "2"},
        {"FOREBAY_STORE", "/s"},
        {"RANK", "7"},
        {"WORLD_SIZE", "9"}},
       {"forebay", 1, 2, 1, 2, "/s"}},
      {"torchrun on one host",
       {{"RANK", "3"},
        {"WORLD_SIZE", "4"},
        {"LOCAL_RANK", "3"},
        {"LOCAL_WORLD_SIZE", "4"},
        {"TORCHELASTIC_RUN_ID", "42"},
        {"TORCHELASTIC_RESTART_COUNT", "1"},
        {"MASTER_ADDR", "localhost"},
        {"MASTER_PORT", "29500"}},
       {"torchrun", 3, 4, 3, 4, ""}},
      {"torchrun on several hosts",
       {{"RANK", "5"},
        {"WORLD_SIZE", "8"},
        {"LOCAL_RANK", "1"},
        {"LOCAL_WORLD_SIZE", "4"},
        {"FOREBAY_STORE", "/shared/run"}},
       {"torchrun", 5, 8, 1, 4, "/shared/run"}},
      {"torchrun on several hosts, with a port",
       {{"RANK", "5"},
        {"WORLD_SIZE", "8"},
        {"LOCAL_RANK", "1"},
        {"LOCAL_WORLD_SIZE", "4"},
        {"TORCHELASTIC_RUN_ID", "run"},
        {"MASTER_ADDR", "node1"},
        {"MASTER_PORT", "29500"},
        {"FOREBAY_STORE_PORT", "29400"},
        {"FOREBAY_INTERFACE", "ib0"}},
       {"torchrun", 5, 8, 1, 4, "tcp://node1:29400/run_node1_29500_0-", "ib0"}},
      {"torchrun with an IPv6 address",
       {{"RANK", "0"},
        {"WORLD_SIZE", "2"},
        {"LOCAL_RANK", "0"},
        {"LOCAL_WORLD_SIZE", "1"},
        {"MASTER_ADDR", "fd00::1"},
        {"FOREBAY_STORE_PORT", "29400"}},
       {"torchrun", 0, 2, 0, 1, "tcp://[fd00::1]:29400/"}},
      {"Open MPI on several hosts, through PMIx",
       {{"OMPI_COMM_WORLD_RANK", "1"},
        {"OMPI_COMM_WORLD_SIZE", "4"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
        {"PMIX_RANK", "1"},
        {"PMIX_NAMESPACE", "2283143169"}},
       {"open-mpi", 1, 4, 1, 2, "pmix://2283143169"}},
      {"MPICH, inside of an allocation of Slurm, which says otherwise",
       {{"PMI_RANK", "1"},
        {"PMI_SIZE", "4"},
        {"MPI_LOCALRANKID", "1"},
        {"MPI_LOCALNRANKS", "2"},
        {"SLURM_PROCID", "0"},
        {"SLURM_NTASKS", "2"},
        {"FOREBAY_STORE", "/run/here"}},
       {"mpich", 1, 4, 1, 2, "/run/here"}},
      {"a store over TCP gets the job that the launcher names",
       {{"SLURM_PROCID", "1"},
        {"SLURM_NTASKS", "2"},
        {"SLURM_JOB_ID", "17"},
        {"FOREBAY_STORE", "tcp://node1:29400"}},
       {"slurm", 1, 2, 0, 1, "tcp://node1:29400/17_0_0-"}},
      {"a store over TCP keeps the job that is given",
       {{"SLURM_PROCID", "1"},
        {"SLURM_NTASKS", "2"},
        {"SLURM_JOB_ID", "17"},
        {"FOREBAY_STORE", "tcp://node1:29400/mine"}},
       {"slurm", 1, 2, 0, 1, "tcp://node1:29400/mine"}},
      {"Slurm on several nodes, with a port",
       {{"SLURM_PROCID", "3"},
        {"SLURM_NTASKS", "4"},
        {"SLURM_NNODES", "2"},
        {"SLURM_LOCALID", "1"},
        {"SLURM_JOB_ID", "17"},
        {"SLURM_STEP_NODELIST", "node[03-05,9],gpu1"},
        {"FOREBAY_STORE_PORT", "29400"}},
       {"slurm", 3, 4, 1, 2, "tcp://node03:29400/17_0_0-"}},
      {"Slurm on several nodes, the first of which is in no range",
       {{"SLURM_PROCID", "3"},
        {"SLURM_NTASKS", "4"},
        {"SLURM_NNODES", "2"},
        {"SLURM_LOCALID", "1"},
        {"SLURM_JOB_ID", "17"},
        {"SLURM_STEP_NODELIST", "node[03,05-07]"},
        {"FOREBAY_STORE_PORT", "29400"}},
       {"slurm", 3, 4, 1, 2, "tcp://node03:29400/17_0_0-"}},
      {"PMIx under Slurm on several nodes",
       {{"PMIX_RANK", "1"},
        {"PMIX_NAMESPACE", "slurm.pmix.7.0"},
        {"SLURM_NTASKS", "2"},
        {"SLURM_NNODES", "2"},
        {"SLURM_LOCALID", "0"},
        {"SLURM_STEP_NODELIST", "a1,a2"}},
       {"pmix", 1, 2, 0, 1, "pmix://slurm_pmix_7_0-"}},
      {"Open MPI",
       {{"OMPI_COMM_WORLD_RANK", "1"},
        {"OMPI_COMM_WORLD_SIZE", "3"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
        {"PMIX_RANK", "1"},
        {"PMIX_NAMESPACE", "2283143169"}},
       {"open-mpi", 1, 3, 1, 3, derived("open-mpi", "2283143169")}},
      {"PMIx under Slurm",
       {{"PMIX_RANK", "1"},
        {"PMIX_NAMESPACE", "slurm_pmix_7"},
        {"SLURM_NTASKS", "2"},
        {"SLURM_NNODES", "1"},
        {"SLURM_LOCALID", "1"},
        {"SLURM_PROCID", "1"}},
       {"pmix", 1, 2, 1, 2, derived("pmix", "slurm_pmix_7")}},
      {"PMIx with a given size",
       {{"PMIX_RANK", "0"}, {"PMIX_NAMESPACE", "n"}, {"FOREBAY_SIZE", "6"}, {"FOREBAY_STORE", "/s"}},
       {"pmix", 0, 6, 0, 1, "/s"}},
      {"Slurm on one node",
       {{"SLURM_PROCID", "3"},
        {"SLURM_NTASKS", "4"},
        {"SLURM_LOCALID", "3"},
        {"SLURM_NNODES", "1"},
        {"SLURM_JOB_ID", "17"},
        {"SLURM_STEP_ID", "2"}},
       {"slurm", 3, 4, 3, 4, ""}},
      {"Slurm, where the step is smaller than the job",
       {{"SLURM_PROCID", "1"},
        {"SLURM_NTASKS", "8"},
        {"SLURM_STEP_NUM_TASKS", "2"},
        {"SLURM_STEP_NUM_NODES", "1"},
        {"SLURM_NNODES", "4"},
        {"SLURM_LOCALID", "1"},
        {"FOREBAY_STORE", "/s"}},
       {"slurm", 1, 2, 1, 2, "/s"}},
      {"the first task of a Slurm step that is smaller than the job",
       {{"SLURM_PROCID", "0"},
        {"SLURM_NTASKS", "8"},
        {"SLURM_STEP_NUM_TASKS", "2"},
        {"SLURM_STEP_NUM_NODES", "1"},
        {"SLURM_NNODES", "4"},
        {"SLURM_LOCALID", "0"},
        {"FOREBAY_STORE", "/s"}},
       {"slurm", 0, 2, 0, 2, "/s"}},
      {"a Slurm batch script without srun",
       {{"SLURM_PROCID", "0"}, {"SLURM_JOB_ID", "17"}},
       {.launcher = "none"}},
      {"a Slurm allocation's shell", {{"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "17"}}, {.launcher = "none"}},
      {"MVAPICH",
       {{"MV2_COMM_WORLD_RANK", "3"},
        {"MV2_COMM_WORLD_SIZE", "4"},
        {"MV2_COMM_WORLD_LOCAL_RANK", "1"},
        {"MV2_COMM_WORLD_LOCAL_SIZE", "2"},
        {"FOREBAY_STORE", "/s"}},
       {"mvapich", 3, 4, 1, 2, "/s"}},
      {"jsrun on several hosts, with PMIx, and without Open MPI",
       {{"JSM_NAMESPACE_RANK", "3"},
        {"JSM_NAMESPACE_SIZE", "4"},
        {"JSM_NAMESPACE_LOCAL_RANK", "1"},
        {"JSM_NAMESPACE_LOCAL_SIZE", "2"},
        {"PMIX_RANK", "3"},
        {"PMIX_NAMESPACE", "7"}},
       {"jsrun", 3, 4, 1, 2, "pmix://7"}},
      {"Flux on one node, inside of an allocation of Slurm",
       {{"FLUX_TASK_RANK", "1"},
        {"FLUX_JOB_SIZE", "3"},
        {"FLUX_TASK_LOCAL_ID", "1"},
        {"FLUX_JOB_NNODES", "1"},
        {"FLUX_JOB_ID", "92"},
        {"PMI_RANK", "1"},
        {"PMI_SIZE", "3"},
        {"SLURM_PROCID", "0"},
        {"SLURM_NTASKS", "2"}},
       {"flux", 1, 3, 1, 3, derived("flux", "92")}},
      {"Flux on several nodes",
       {{"FLUX_TASK_RANK", "3"},
        {"FLUX_JOB_SIZE", "4"},
        {"FLUX_TASK_LOCAL_ID", "1"},
        {"FLUX_JOB_NNODES", "2"},
        {"FLUX_JOB_ID", "92"},
        {"FOREBAY_STORE", "tcp://node1:29400"}},
       {"flux", 3, 4, 1, 2, "tcp://node1:29400/92"}},
      {"a Flux batch script", {{"FLUX_JOB_SIZE", "4"}, {"FLUX_JOB_ID", "92"}}, {.launcher = "none"}},
      {"PALS",
       {{"PMI_RANK", "5"},
        {"PMI_SIZE", "8"},
        {"PMI_LOCAL_RANK", "1"},
        {"PMI_LOCAL_SIZE", "4"},
        {"PALS_APID", "0a-1"},
        {"FOREBAY_STORE", "tcp://node1:29400"}},
       {"pals", 5, 8, 1, 4, "tcp://node1:29400/0a-1"}},
      {"forebay by hand with two ranks on each host",
       {{"FOREBAY_RANK", "3"}, {"FOREBAY_SIZE", "4"}, {"FOREBAY_LOCAL_SIZE", "2"}, {"FOREBAY_STORE", "/s"}},
       {"forebay", 3, 4, 1, 2, "/s"}},
      {"as many ranks as there may be",
       {{"FOREBAY_RANK", "99999"},
        {"FOREBAY_SIZE", "100000"},
        {"FOREBAY_LOCAL_SIZE", "100000"},
        {"FOREBAY_STORE", "/s"}},
       {"forebay", 99999, 100000, 99999, 100000, "/s"}},
      {"Open MPI 4, without PMIx",
       {{"OMPI_COMM_WORLD_RANK", "0"},
        {"OMPI_COMM_WORLD_SIZE", "2"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
        {"OMPI_MCA_orte_ess_jobid", "41"},
        {"OMPI_MCA_ess_base_jobid", "42"}},
       {"open-mpi", 0, 2, 0, 2, derived("open-mpi", "41")}},
      {"an older Open MPI",
       {{"OMPI_COMM_WORLD_RANK", "0"},
        {"OMPI_COMM_WORLD_SIZE", "2"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
        {"OMPI_MCA_ess_base_jobid", "42"}},
       {"open-mpi", 0, 2, 0, 2, derived("open-mpi", "42")}},
      {"Slurm on the one node of a job that names no step",
       {{"SLURM_PROCID", "0"},
        {"SLURM_NTASKS", "4"},
        {"SLURM_LOCALID", "0"},
        {"SLURM_JOB_NUM_NODES", "1"},
        {"SLURM_JOB_ID", "17"}},
       {"slurm", 0, 4, 0, 4, ""}},
      {"Slurm on the nodes of a job that names no step",
       {{"SLURM_PROCID", "1"},
        {"SLURM_NTASKS", "2"},
        {"SLURM_LOCALID", "0"},
        {"SLURM_JOB_NUM_NODES", "2"},
        {"SLURM_JOB_ID", "17"},
        {"SLURM_JOB_NODELIST", "gpu[7-8]"},
        {"FOREBAY_STORE_PORT", "1"}},
       {"slurm", 1, 2, 0, 1, "tcp://gpu7:1/17_0_0-"}},
      {"Slurm that says no task on each node",
       {{"SLURM_PROCID", "1"},
        {"SLURM_NTASKS", "2"},
        {"SLURM_NNODES", "2"},
        {"SLURM_NTASKS_PER_NODE", "0"},
        {"FOREBAY_STORE", "/s"}},
       {"slurm", 1, 2, 0, 1, "/s"}},
      {"a store that PMIx serves",
       {{"FOREBAY_RANK", "1"}, {"FOREBAY_SIZE", "2"}, {"FOREBAY_STORE", "pmix://job"}},
       {"forebay", 1, 2, 1, 2, "pmix://job"}},
      {"Slurm with tasks on each of two nodes, more than there are",
       {{"SLURM_PROCID", "1"},
        {"SLURM_NTASKS", "4"},
        {"SLURM_NNODES", "2"},
        {"SLURM_NTASKS_PER_NODE", "9"},
        {"SLURM_LOCALID", "1"},
        {"FOREBAY_STORE", "/s"}},
       {"slurm", 1, 4, 1, 4, "/s"}},
      {"Slurm with two tasks on each node",
       {{"SLURM_PROCID", "2"},
        {"SLURM_NTASKS", "4"},
        {"SLURM_NNODES", "2"},
        {"SLURM_NTASKS_PER_NODE", "2"},
        {"SLURM_LOCALID", "0"},
        {"FOREBAY_STORE", "/s"}},
       {"slurm", 2, 4, 0, 2, "/s"}},
      {"Slurm on two nodes with names alone",
       {{"SLURM_PROCID", "1"},
        {"SLURM_NTASKS", "2"},
        {"SLURM_NNODES", "2"},
        {"SLURM_LOCALID", "0"},
        {"SLURM_JOB_ID", "17"},
        {"SLURM_STEP_NODELIST", "login,node[1-2]"},
        {"FOREBAY_STORE_PORT", "65535"}},
       {"slurm", 1, 2, 0, 1, "tcp://login:65535/17_0_0-"}},
      {"Flux on two nodes, its first task",
       {{"FLUX_TASK_RANK", "2"},
        {"FLUX_JOB_SIZE", "4"},
        {"FLUX_TASK_LOCAL_ID", "0"},
        {"FLUX_JOB_NNODES", "2"},
        {"FOREBAY_STORE", "/s"}},
       {"flux", 2, 4, 0, 1, "/s"}},
      {"empty variables are unset ones", {{"RANK", ""}, {"WORLD_SIZE", ""}}, {.launcher = "none"}},
  };
  for (const Good& test : cases) {
    SCOPED_TRACE(test.name);
    const Result<LaunchEnvironment> result = internal::read_launch_variables(test.variables);
    ASSERT_TRUE(result.ok()) << result.status().to_string();
    const LaunchEnvironment& read = result.value();
    EXPECT_EQ(read.launcher, test.expected.launcher);
    EXPECT_EQ(read.rank, test.expected.rank);
    EXPECT_EQ(read.size, test.expected.size);
    EXPECT_EQ(read.local_rank, test.expected.local_rank);
    EXPECT_EQ(read.local_size, test.expected.local_size);
    EXPECT_EQ(read.interface, test.expected.interface);
    if (!test.expected.store.empty() &&
        (test.expected.store.back() == '-' || test.expected.store.back() == '/')) {
      EXPECT_TRUE(read.store.starts_with(test.expected.store)) << read.store;
    } else if (!test.expected.store.empty()) {
      EXPECT_EQ(read.store, test.expected.store);
    } else {
      EXPECT_EQ(read.store.empty(), read.size == 1);
    }
  }
}

TEST(LaunchEnvironment, SaysWhichVariableIsWrong) {
  struct Bad {
    Variables variables;
    const char* word;
  };
  const std::vector<Bad> cases = {
      {{{"FOREBAY_RANK", "0"}}, "FOREBAY_SIZE is not"},
      {{{"FOREBAY_SIZE", "2"}}, "FOREBAY_RANK is not"},
      {{{"FOREBAY_RANK", "two"}, {"FOREBAY_SIZE", "4"}}, "FOREBAY_RANK is \"two\""},
      {{{"FOREBAY_RANK", "-1"}, {"FOREBAY_SIZE", "4"}}, "FOREBAY_RANK is \"-1\""},
      {{{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "999999999999"}},
       "FOREBAY_SIZE is \"999999999999\", which is not a whole number from 0 to 2147483647"},
      {{{"FOREBAY_RANK", "\x1b[2J"}, {"FOREBAY_SIZE", "4"}}, "FOREBAY_RANK is \"\\x1b[2J\""},
      {{{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "4"}, {"FOREBAY_STORE", "\x1b://h"}}, "is \\x1b://h"},
      {{{"FOREBAY_RANK", "1x"}, {"FOREBAY_SIZE", "4"}}, "FOREBAY_RANK is \"1x\""},
      {{{"FOREBAY_RANK", "4"}, {"FOREBAY_SIZE", "4"}},
       "FOREBAY_RANK is 4, but FOREBAY_SIZE is 4; ranks are 0 to 3"},
      {{{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "0"}}, "FOREBAY_SIZE is 0"},
      {{{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "99999999999"}}, "FOREBAY_SIZE"},
      {{{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "2"}}, "set FOREBAY_STORE"},
      {{{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "2"}, {"FOREBAY_STORE", "http://x"}},
       "FOREBAY_STORE is http://x, but ranks cannot meet over http"},
      {{{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "2"}, {"FOREBAY_LOCAL_SIZE", "3"}},
       "FOREBAY_LOCAL_SIZE is 3"},
      {{{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "2"}, {"FOREBAY_LOCAL_SIZE", "0"}, {"FOREBAY_STORE", "/s"}},
       "FOREBAY_LOCAL_SIZE is 0, but FOREBAY_SIZE is 2; it must be from 1 to that number"},
      {{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "2"}, {"FOREBAY_STORE", "/s"}},
       "SLURM_LOCALID is 2, but the number of tasks is 2; ranks are 0 to 1"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MV2_COMM_WORLD_SIZE", "4"}}, "MV2_COMM_WORLD_SIZE is 4"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"JSM_NAMESPACE_SIZE", "4"}}, "JSM_NAMESPACE_SIZE is 4"},
      {{{"RANK", "0"},
        {"WORLD_SIZE", "2"},
        {"LOCAL_RANK", "0"},
        {"LOCAL_WORLD_SIZE", "1"},
        {"MASTER_ADDR", "node1"},
        {"FOREBAY_STORE_PORT", "0"}},
       "FOREBAY_STORE_PORT is 0, which is not a port"},
      {{{"RANK", "0"}}, "WORLD_SIZE is not"},
      {{{"WORLD_SIZE", "2"}}, "RANK is not"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "9"}, {"LOCAL_WORLD_SIZE", "2"}},
       "LOCAL_RANK is 9"},
      {{{"RANK", "0"},
        {"WORLD_SIZE", "8"},
        {"LOCAL_RANK", "0"},
        {"LOCAL_WORLD_SIZE", "4"},
        {"MASTER_PORT", "1"}},
       "directory that all hosts share"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}},
       "nothing names this job"},
      {{{"RANK", "0"},
        {"WORLD_SIZE", "8"},
        {"LOCAL_RANK", "0"},
        {"LOCAL_WORLD_SIZE", "4"},
        {"MASTER_ADDR", "node1"},
        {"MASTER_PORT", "29500"}},
       "set FOREBAY_STORE_PORT to a port that is free on node1 (not MASTER_PORT"},
      {{{"RANK", "0"},
        {"WORLD_SIZE", "8"},
        {"LOCAL_RANK", "0"},
        {"LOCAL_WORLD_SIZE", "4"},
        {"MASTER_ADDR", "node1"},
        {"MASTER_PORT", "29500"},
        {"FOREBAY_STORE_PORT", "29500"}},
       "both 29500"},
      {{{"RANK", "0"},
        {"WORLD_SIZE", "8"},
        {"LOCAL_RANK", "0"},
        {"LOCAL_WORLD_SIZE", "4"},
        {"MASTER_ADDR", "node1"},
        {"FOREBAY_STORE_PORT", "65536"}},
       "FOREBAY_STORE_PORT is 65536"},
      {{{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "100001"}, {"FOREBAY_STORE", "/tmp/x"}},
       "a run has at most 100000 ranks"},
      {{{"OMPI_COMM_WORLD_RANK", "0"}}, "OMPI_COMM_WORLD_SIZE is not"},
      {{{"PMIX_RANK", "0"}}, "set FOREBAY_SIZE"},
      {{{"MV2_COMM_WORLD_RANK", "0"}}, "MV2_COMM_WORLD_SIZE is not"},
      {{{"JSM_NAMESPACE_RANK", "0"}}, "JSM_NAMESPACE_SIZE is not"},
      {{{"PMI_RANK", "0"}, {"PMI_LOCAL_SIZE", "2"}}, "PMI_SIZE is not"},
      {{{"FLUX_TASK_RANK", "0"}, {"FLUX_JOB_SIZE", "2"}, {"FLUX_JOB_NNODES", "x"}},
       "FLUX_JOB_NNODES is \"x\""},
      {{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}},
       "2 ranks started by mpich need a place to meet, and nothing names this job; set FOREBAY_STORE"},
      {{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, "PMI_SIZE is 2, but nothing tells the rank's place"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "4"}},
       "OMPI_COMM_WORLD_SIZE is 4, but the variables of torchrun say one rank"},
      {{{"SLURM_PROCID", "1"}}, "SLURM_NTASKS is not"},
      {{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "a"}}, "SLURM_LOCALID"},
      {{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "4"}, {"SLURM_NNODES", "2"}, {"SLURM_JOB_ID", "1"}},
       "set FOREBAY_STORE"},
  };
  for (const Bad& test : cases) {
    SCOPED_TRACE(test.word);
    const Result<LaunchEnvironment> result = internal::read_launch_variables(test.variables);
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(result.status().message().find(test.word), std::string::npos) << result.status().message();
  }
}

TEST(LaunchEnvironment, OneRankWithinAnotherLaunchIsMeantIfItSaysSo) {
  const Variables mpi = {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"PMI_SIZE", "4"}};
  const std::vector<Variables> cases = {
      {{"FOREBAY_RANK", "0"}, {"FOREBAY_SIZE", "1"}},
      {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"TORCHELASTIC_RUN_ID", "none"}},
  };
  for (Variables variables : cases) {
    variables.insert(mpi.begin(), mpi.end());
    const Result<LaunchEnvironment> result = internal::read_launch_variables(variables);
    ASSERT_TRUE(result.ok()) << result.status().message();
    EXPECT_EQ(result.value().size, 1);
  }
}

TEST(LaunchEnvironment, DifferentRunsGetDifferentStores) {
  const Variables base = {{"RANK", "0"},
                          {"WORLD_SIZE", "2"},
                          {"LOCAL_RANK", "0"},
                          {"LOCAL_WORLD_SIZE", "2"},
                          {"TORCHELASTIC_RUN_ID", "a/b"},
                          {"TORCHELASTIC_RESTART_COUNT", "0"},
                          {"MASTER_PORT", "29500"}};
  const auto store = [](Variables variables, const char* name, const char* value) {
    variables[name] = value;
    return internal::read_launch_variables(variables).value().store;
  };
  const std::string same = store(base, "RANK", "1");

  EXPECT_EQ(store(base, "RANK", "0"), same);
  EXPECT_NE(store(base, "TORCHELASTIC_RESTART_COUNT", "1"), same);
  EXPECT_NE(store(base, "TORCHELASTIC_RUN_ID", "a_b"), same);
  EXPECT_NE(store(base, "MASTER_PORT", "29501"), same);
  EXPECT_EQ(same.find("a/b"), std::string::npos);
  const std::string longest = store(base, "TORCHELASTIC_RUN_ID", std::string(5000, 'x').c_str());
  EXPECT_LT(longest.size(), 200u);

  // A name of 96 characters is used as it is, and a longer one is cut and gets its hash.
  const Variables flux = {
      {"FLUX_TASK_RANK", "0"}, {"FLUX_JOB_SIZE", "2"}, {"FLUX_TASK_LOCAL_ID", "0"}, {"FLUX_JOB_NNODES", "1"}};
  const std::string fits(96, 'x');
  EXPECT_EQ(store(flux, "FLUX_JOB_ID", fits.c_str()), derived("flux", fits));
  EXPECT_TRUE(store(flux, "FLUX_JOB_ID", (fits + "y").c_str()).starts_with(derived("flux", fits) + "-"));
}

TEST(LaunchEnvironment, UsesTheRuntimeDirectoryOnlyWhenItExists) {
  Variables variables = {{"OMPI_COMM_WORLD_RANK", "0"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                         {"PMIX_NAMESPACE", "n"},
                         {"XDG_RUNTIME_DIR", "/no/such/directory"}};
  EXPECT_EQ(internal::read_launch_variables(variables).value().store, derived("open-mpi", "n"));

  const testing::TemporaryDirectory directory;
  const auto store_below = [&](const std::string& runtime) {
    variables["XDG_RUNTIME_DIR"] = runtime;
    return internal::read_launch_variables(variables).value().store;
  };
  EXPECT_TRUE(store_below(directory.path()).starts_with(directory.path() + "/forebay-"));
  std::ofstream(directory / "file").close();
  EXPECT_EQ(store_below(directory / "file"), derived("open-mpi", "n")) << "it is no directory";
  if (geteuid() == 0) {
    ASSERT_EQ(chown(directory.path().c_str(), 12345, 12345), 0);
    EXPECT_EQ(store_below(directory.path()), derived("open-mpi", "n")) << "it is another user's";
    ASSERT_EQ(chown(directory.path().c_str(), 0, 0), 0);
  }
}

TEST(LaunchEnvironment, ReadsThisProcess) {
  ASSERT_EQ(setenv("FOREBAY_RANK", "1", 1), 0);
  ASSERT_EQ(setenv("FOREBAY_SIZE", "3", 1), 0);
  ASSERT_EQ(setenv("FOREBAY_STORE", "/s", 1), 0);
  const Result<LaunchEnvironment> result = read_launch_environment();
  for (const char* name : {"FOREBAY_RANK", "FOREBAY_SIZE", "FOREBAY_STORE"}) unsetenv(name);
  ASSERT_TRUE(result.ok()) << result.status().to_string();
  EXPECT_EQ(result.value().rank, 1);
  EXPECT_EQ(result.value().size, 3);
}

}  // namespace
}  // namespace forebay
