#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that several ranks on GPUs have to show: the distributed suites on every transport of device memory (a killed
# peer among them), a soak with random delays, and `nvte-ep bench ep`. On as many GPUs as there are; ranks share them where
# there are fewer. A call takes nine minutes at most and each part has its limit; what went well is not done again by the
# next call, so that a run that was cut off goes on where it was.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'TEXT'
usage: ci/gpu_ranks.sh [--ranks N] [--parts PART,...] [--transports NAME,...] [--figures NAME,...] [--quick]
                       [--soak-passes N] [--out DIR] [--seconds N] [--again]
  --ranks N      the most ranks of a case of the table, and the ranks of soak and bench
                 (default: the number of GPUs; for the suites at least 4)
  --quick        of the suites: no case of more than N ranks, and not what is the same on every transport; a short soak
  --parts        of build,suites,soak,bench (default: these) and sanitizer
  --transports   of peer_threads,peer_processes,peer_ipc,nccl_ep,nccl_ep_few,nccl (default: all but peer_ipc; one that
                 cannot run is a failure)
  --soak-passes  of the soaks of threads, 2,000 iterations each (default: 50; with --quick 5)
  --figures      of bench: of layer,steps,sms24,backward,tokens,experts,threads (default: these, and from 4 ranks on
                 wide: 256 experts, beside NCCL EP); threads is on one GPU
  --out DIR      summary.txt, logs.tar.gz and the figures of bench (default: $OUT, else build/gpu_ranks)
  --seconds N    what a call may take (default: 530, nine minutes less the start)
  --again        also what went well already, as build-gpu/ranks-N has it
Environment: NVTE_EP_BUILD_DIR (build: the GPU side goes to build-gpu), PYTHON (python3), CUDACXX, and NCCL_HOME where the
             NCCL to use is not the first that is found
TEXT
}

ranks="" parts=build,suites,soak,bench transports=peer_threads,peer_processes,nccl_ep,nccl_ep_few,nccl again=0 quick=0 seconds=530
soak_passes="" figures=""
out="${OUT:-$BUILD_DIR/gpu_ranks}"
while [[ $# -gt 0 ]]; do
  case "$1" in
    --ranks) ranks="$2"; shift ;;
    --parts) parts="$2"; shift ;;
    --transports) transports="$2"; shift ;;
    --figures) figures="$2"; shift ;;
    --out) out="$2"; shift ;;
    --again) again=1 ;;
    --seconds) seconds="$2"; shift ;;
    --quick) quick=1 ;;
    --soak-passes) soak_passes="$2"; shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown argument: $1" ;;
  esac
  shift
done
for part in ${parts//,/ }; do
  [[ ,build,suites,soak,bench,sanitizer, == *,"$part",* ]] || die "--parts: unknown '$part'"
done
for figure in ${figures//,/ }; do
  [[ ,layer,steps,sms24,backward,tokens,experts,threads,wide, == *,"$figure",* ]] || die "--figures: unknown '$figure'"
done
gpus="$(nvidia-smi --query-gpu=name --format=csv,noheader | grep -c . || true)"
[[ $gpus -ge 1 ]] || die "there is no GPU"
ranks="${ranks:-$gpus}"
figures="${figures:-layer,steps,sms24,backward,tokens,experts,threads$([[ $ranks -lt 4 ]] || echo ,wide)}"
several=$((ranks > 2 ? ranks : 2))  # one has no peer
soak_passes="${soak_passes:-$((quick ? 5 : 50))}"
python="${PYTHON:-python3}"
build="$BUILD_DIR-gpu"
work="$build/ranks-$ranks$([[ $quick -eq 0 ]] || echo -quick)"  # a log and a result for each step
mkdir -p "$out" "$work"
out="$(realpath "$out")"
export NVTE_EP_LIBRARY="$build/src/libnvte_ep.so" NVTE_EP_BUILD_DIR="$build"
export PYTHONPATH="$ROOT/python:$ROOT/tests" PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export NVTE_EP_MAX_RANKS="$((ranks > 4 ? ranks : 4))"
[[ $quick -eq 0 ]] || NVTE_EP_MAX_RANKS="$several"
export NVTE_EP_REQUIRE="${NVTE_EP_REQUIRE:-cuda,conformance_ranks}"
[[ $several -le $gpus ]] || export NCCL_MULTI_RANK_GPU_ENABLE=1
# A framework may bring an NCCL of its own, and the first that a process loads is the one that it uses.
preload=(env)
[[ ! -f ${NCCL_HOME:-}/lib/libnccl.so.2 ]] || preload=(env LD_PRELOAD="$NCCL_HOME/lib/libnccl.so.2")
cd "$ROOT"
end=$((SECONDS + seconds))
nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader | tee "$work/devices.txt"

# step NAME SECONDS COMMAND...: runs it once. Keeps its log, and in NAME.result how it went.
step() {
  local name="$1" limit="$2" begin=$SECONDS code=0
  shift 2
  if [[ $again -eq 0 && $name != build ]] && grep -qs '^ok ' "$work/$name.result"; then
    echo "$name: done already"
    return
  fi
  [[ $limit -lt $((end - SECONDS)) ]] || limit=$((end - SECONDS))
  if [[ $limit -lt 5 ]]; then
    echo "LEFT-OUT 0 no time left: run the script again" | tee "$work/$name.result"
    return
  fi
  say "$name (at most $limit s)"
  timeout --kill-after=10 "$limit" "$@" >"$work/$name.log" 2>&1 || code=$?
  local how="ok"
  [[ $code -eq 0 ]] || how="FAILED"
  [[ $code -ne 124 && $code -ne 137 ]] || how="TIME-OUT"
  # The last line that says something.
  echo "$how $((SECONDS - begin)) $(grep -v '^ *$' "$work/$name.log" | tail -1 | tr -d '=' | cut -c1-110)" >"$work/$name.result"
  echo "$name: $(cat "$work/$name.result")"
  [[ $code -eq 0 ]] || grep -E '^(FAILED|ERROR|E  )' "$work/$name.log" | sort -u | cut -c1-200 | head -20 || true
}

# figure NAME ARGUMENTS...: of nvte-ep bench ep.
figure() {
  local name="$1"
  shift
  step "bench_$name" 110 "${preload[@]}" "$python" -m nvte_ep bench ep --quick "$@" --json "$out/ep_$name.json" \
    --markdown "$out/ep_$name.md"
}

for part in ${parts//,/ }; do
  case "$part" in
    build)
      if ! command -v cmake >/dev/null || ! command -v ninja >/dev/null; then venv_with "$VENV" cmake ninja; fi
      # shellcheck disable=SC2016 # the inner shell expands them
      PATH="$PATH:$VENV/bin" step build 150 bash -ec '
        cmake -S "$ROOT" -B "$NVTE_EP_BUILD_DIR" -G Ninja -DNVTE_EP_CUDA=ON -DNVTE_EP_BUILD_TESTS=ON
        cmake --build "$NVTE_EP_BUILD_DIR" --target nvte_ep conformance_ranks soak_peer'
      ;;
    suites)
      suite=("$python" -m pytest -p no:cacheprovider -v --tb=short -o faulthandler_timeout=120 -o junit_family=xunit1
        --durations 15)
      exchanges=(steps capture)
      groups=(identities failures)
      same=()  # on every transport
      [[ $quick -eq 1 ]] || same=(checklist fidelity gradients routing_properties stochastic)
      # Processes that share GPUs take turns in time slices, so one suite of them at a time, in steps for a run that is
      # cut off: each must end within its limit. Threads may run beside them.
      # suites TRANSPORT STEP SECONDS NAME...
      suites() {
        local name="suite_$1_$2" limit="$3" tests=("${@:4}")
        tests=("${tests[@]/#/tests/distributed/test_}")
        NVTE_EP_TRANSPORTS="$1" step "$name" "$limit" "${suite[@]}" --junit-xml "$work/$name.xml" "${tests[@]/%/.py}"
      }
      if [[ ,$transports, == *,peer_threads,* ]]; then
        suites peer_threads all 150 "${exchanges[@]}" "${groups[@]}" "${same[@]}" &
      fi
      for transport in ${transports//,/ }; do
        [[ $transport != peer_threads ]] || continue
        suites "$transport" exchanges 240 "${exchanges[@]}"
        [[ $transport != nccl_ep* ]] || continue  # it compiles for each shape, and the others have any
        suites "$transport" programs 200 programs
        suites "$transport" groups 200 "${groups[@]}"
        [[ ${#same[@]} -eq 0 ]] || suites "$transport" same 240 "${same[@]}"
      done
      wait
      ;;
    soak)
      soak=("${preload[@]}" "$build/tests/cuda/soak_peer" --ranks "$several" --gpus "$gpus")
      if [[ ,$transports, == *,peer_threads,* ]]; then
        step "soak_threads_$soak_passes" 150 "${soak[@]}" --passes "$soak_passes"
        step soak_threads_graph 60 "${soak[@]}" --passes "$((soak_passes < 20 ? soak_passes : 20))" --graph
        step soak_threads_hog 60 "${soak[@]}" --passes "$((soak_passes < 20 ? soak_passes : 20))" --hog 60
        step soak_threads_groups 30 "${soak[@]}" --passes 5 --groups 3
        step soak_threads_many 40 "${soak[@]}" --passes 2 --iterations 300 --tokens 2048 --hidden 7168  # combine in passes
      fi
      [[ ,$transports, == *,peer_processes,* ]] || continue
      [[ $several -le $gpus ]] || soak+=(--iterations 100)  # they take turns on a GPU
      for memory in windows ipc; do
        export NVTE_EP_PEER_MEMORY="$memory"
        step "soak_$memory" 45 "${soak[@]}" --kind processes --seconds "$((quick ? 4 : 15))"
        step "killed_peer_$memory" 30 "${soak[@]}" --kind processes --timeout 2 --kill 1
        step "stalled_peer_$memory" 30 "${soak[@]}" --kind processes --timeout 2 --stall 1
      done
      unset NVTE_EP_PEER_MEMORY
      ;;
    sanitizer)
      small=("$build/tests/cuda/soak_peer" --ranks 2 --gpus "$gpus" --iterations 2 --tokens 24 --hidden 256 --delay 0)
      # NCCL asks for attributes of kernels that are not there, which is no error of a kernel.
      checker=("${preload[@]}" compute-sanitizer --error-exitcode 9 --print-limit 20 --target-processes all
        --report-api-errors no)
      if [[ ,$transports, == *,peer_* ]]; then
        step memcheck_peer 60 "${checker[@]}" --tool memcheck "${small[@]}"
        step racecheck_peer 60 "${checker[@]}" --tool racecheck "${small[@]}"
      fi
      # Not racecheck: NCCL's kernels are not ours to mend.
      if [[ ,$transports, == *,nccl,* ]]; then
        step memcheck_nccl 90 "${checker[@]}" --tool memcheck "${small[@]}" --transport nccl --kind processes
      fi
      # Not low-latency mode: a race of NCCL EP's is lost under it (docs/device_transports.md).
      if [[ ,$transports, == *,nccl_ep,* ]]; then
        steps=tests/gpu/test_device_transports.py::test_nccl_ep_processes
        step memcheck_nccl_ep 150 "${checker[@]}" --tool memcheck "$python" -m pytest -p no:cacheprovider -q \
          "${steps}[1 ranks, nvfp4, bfloat16, H 512, capacity 1024, T 170]" \
          "${steps}[2 ranks, nvfp4, bfloat16, H 512, capacity 1024, T 170]"
      fi
      ;;
    bench)
      moved="dispatch bf16 ->,packed -> rows,nvfp4 -> operand,combine bf16"
      peer=(--transports peer --no-nccl-ep --no-host)
      for figure in ${figures//,/ }; do
        case "$figure" in
          layer) figure layer --ranks "$ranks" --tokens 4096 ;;
          steps) figure steps --ranks "$ranks" --tokens 128 --alignment 16 ;;
          sms24) figure sms24 --ranks "$ranks" --tokens 4096 --num-sms 24 --no-host --only "$moved" ;;
          backward)
            figure backward --ranks "$ranks" --tokens 4096 "${peer[@]}" --only "backward,packed -> operand,combine mxfp8"
            ;;
          tokens) figure tokens --ranks "$ranks" --tokens 1024,2048,4096,8192 "${peer[@]}" --only "prepare,$moved" ;;
          experts) figure experts --ranks "$ranks" --experts 64,256 "${peer[@]}" --only "prepare,$moved" ;;
          wide)
            figure wide --ranks "$ranks" --experts 256 --tokens 1024,4096,8192 --no-host --only "prepare,$moved,combine mxfp8"
            figure wide_steps --ranks "$ranks" --experts 256 --tokens 128 --alignment 16
            ;;
          threads)
            for number in 2 4 8; do  # on one GPU
              CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" figure "threads_$number" --ranks "$number" --threads \
                --tokens 1024 --no-host --only "prepare,$moved"
            done
            ;;
        esac
      done
      ;;
  esac
done

failed=0
for result in "$work"/*.result; do grep -q '^ok ' "$result" || failed=1; done
{
  say "$ranks ranks on $gpus GPUs"
  printf '%-30s %-9s %6s  %s\n' part result s "last line"
  for result in "$work"/*.result; do
    read -r how took line <"$result"
    printf '%-30s %-9s %6s  %s\n' "$(basename "$result" .result)" "$how" "$took" "$line"
  done
} | tee "$out/summary.txt"
tar -czf "$out/logs.tar.gz" -C "$work" .
exit $failed
