-- make bench: speed and memory of dtrain beside their floors, and beside PyTorch's where DT_PEER_PYTHON names a Python that has it.
--   DT_BUILD=build lua5.4 tests/bench/run.lua [word ...]      words choose rows: gpt mlp4 linear mlp128 cnn zero tensor pipeline start
--                                                             allreduce plan
--   DT_BEFORE=checkout       a built checkout of an earlier commit: its step is timed beside ours, and the ratio printed
-- Each figure is the median over rounds (DT_BENCH_ROUNDS, 3); in a round every competitor of a row runs once, one after
-- another, so that a slow minute of the machine hits all alike. Nothing else should run meanwhile.
local build = os.getenv "DT_BUILD" or "build"
local python = os.getenv "DT_PEER_PYTHON"
local rounds = tonumber(os.getenv "DT_BENCH_ROUNDS" or "") or 3
local before = os.getenv "DT_BEFORE"
local words = { table.unpack(arg) }

local function capture(command)
  local p <close> = assert(io.popen(command .. " 2>&1", "r"))
  return p:read "a", p:close()
end
local function median(list)
  table.sort(list)
  return list[#list // 2 + 1]
end
local function seconds()
  local p <close> = assert(io.popen "date +%s.%N")
  return p:read "n"
end

local cores = math.tointeger(capture "nproc":match "%d+")

-- ---- commands: each returns a table of figures ----
local function result(text)
  local out = {}
  local line = (text:match "RESULT_PIPE ([^\n]*)" or "") .. " " .. (text:match "RESULT ([^\n]*)" or "")
  for key, value in line:gmatch "([%w_]+)=([%d.]+)" do out[key] = tonumber(value) end
  if not next(out) then error("no result:\n" .. text, 0) end
  if text:find "RESULT .*RESULT " then -- ranks that print each: the slowest
    for us in text:gmatch "step_us=([%d.]+)" do out.step_us = math.max(out.step_us, tonumber(us)) end
  end
  return out
end
-- The step of a build: run() -> figures, and the same of the earlier one, or nil.
local function step_of(root, program, work, ranks, threads, more)
  local command = ("%s %stests/bench/work.lua --work %s --ranks %d --threads %d %s"):format(program, root, work, ranks, threads,
    more or "")
  if ranks > 1 then command = ("tests/tools/ranks %d %s"):format(ranks, command) end
  return function() return result(capture(command)) end
end
local function ours(work, ranks, threads, more)
  return step_of("", build .. "/dtrain", work, ranks, threads, more),
    before and step_of(before .. "/", before .. "/build/dtrain", work, ranks, threads, more)
end
local function floor(ranks, threads)
  local command = ("%s/bench/matmul_floor %d"):format(build, 2048 // ranks)
  if ranks > 1 then command = ("tests/tools/ranks %d %s"):format(ranks, command) end
  return function() return result(capture(("OMP_NUM_THREADS=%d %s"):format(threads, command))) end
end
local function peer(work, ranks, threads, more)
  if not python then return nil end
  local run = ranks > 1 and ("%s -m torch.distributed.run --nproc-per-node %d"):format(python, ranks) or python
  local command = ("OMP_NUM_THREADS=%d %s tests/bench/peer.py %s %s"):format(threads, run, work, more or "")
  return function() return result(capture(command)) end
end
local function wall(command)
  return function()
    local begin = seconds()
    local text, ok = capture(command)
    if not ok then error(command .. ":\n" .. text, 0) end
    return { step_us = (seconds() - begin) * 1e6 }
  end
end
local function ranks2(command) return "tests/tools/ranks 2 " .. command end

-- ---- rows: name, competitors { label, command }, the first ours; claims { text, share(figures) -> number, bar, ">=" or "<=" } ----
local function over(i, key) return function(f) return f[i] and f[i][key or "step_us"] / f[1][key or "step_us"] end end
local function under(i, key) return function(f) return f[i] and f[1][key or "step_us"] / f[i][key or "step_us"] end end
local function microseconds(f) return f[1].step_us end

local rows = {
  { name = "gpt", title = "gpt small step, f32, 1 process x 2 threads",
    { "dtrain", ours("gpt", 1, 2) }, { "its matrix products (oneDNN)", floor(1, 2) },
    { "PyTorch eager", peer("gpt", 1, 2) }, { "PyTorch compile", peer("gpt", 1, 2, "--compile") },
    claims = { { "of its matrix products", under(2), 1.22, "<=" }, { "x PyTorch eager", over(3), 1.35, ">=" },
      { "x PyTorch compile", over(4), 1.15, ">=" },
      { "of PyTorch's peak memory", under(3, "peak_mb"), 0.5, "<=" },
      { "MB of peak memory above the plan", function(f) return f[1].peak_mb - f[1].plan_mb end, 150, "<=" } } },
  { name = "gpt", title = "gpt small step, f32, 2 ranks x 1 thread",
    { "dtrain", ours("gpt", 2, 1) }, { "dtrain, 1 process x 2 threads", ours("gpt", 1, 2) },
    { "its matrix products (oneDNN)", floor(2, 1) }, { "PyTorch DDP", peer("gpt", 2, 1) },
    claims = { { "of dtrain's own one-process speed", over(2), 0.95, ">=" }, { "of its matrix products", under(3) },
      { "x PyTorch DDP", over(4), 1.18, ">=" } } },
  { name = "mlp4", title = "MLP 4 x 1024, batch 64 a rank, AdamW, 2 ranks",
    { "dtrain", ours("mlp4", 2, 1) }, { "dtrain, 1 rank x 1 thread", ours("mlp4", 1, 1) }, { "PyTorch DDP", peer("mlp4", 2, 1) },
    claims = { { "of its own one-rank step", under(2), 1.15, "<=" }, { "x PyTorch DDP", over(3), 1.6, ">=" } } },
  { name = "linear", title = "Linear 10 -> 5 step, batch 32, 1 process",
    { "dtrain", ours("linear", 1, 2) }, { "PyTorch", peer("linear", 1, 2) },
    claims = { { "us", microseconds, 15, "<=" }, { "x PyTorch", over(2) } } },
  { name = "linear", title = "Linear 10 -> 5 step, batch 32 a rank, 2 ranks",
    { "dtrain", ours("linear", 2, 1) }, { "PyTorch DDP", peer("linear", 2, 1) },
    claims = { { "us", microseconds, 40, "<=" }, { "x PyTorch DDP", over(2) } } },
  { name = "mlp128", title = "MLP 784-128-10 step, batch 64, Adam",
    { "dtrain", ours("mlp128", 1, 2) }, { "PyTorch", peer("mlp128", 1, 2) },
    claims = { { "us", microseconds, 200, "<=" }, { "x PyTorch", over(2) } } },
  { name = "cnn", title = "CNN of fashion_cnn step, batch 64",
    { "dtrain", ours("cnn", 1, 2) }, { "PyTorch", peer("cnn", 1, 2) },
    claims = { { "us", microseconds, 42000, "<=" }, { "x PyTorch", over(2) } } },
  { name = "zero", title = "gpt small step, f32, ZeRO on 2 ranks x 1 thread",
    { "ZeRO-1", ours("gpt", 2, 1, "--parallel zero=1") }, { "ZeRO-2", ours("gpt", 2, 1, "--parallel zero=2") },
    { "ZeRO-3", ours("gpt", 2, 1, "--parallel zero=3") }, { "DDP", ours("gpt", 2, 1) },
    { "PyTorch FSDP2", peer("gpt", 2, 1, "--fsdp") },
    claims = { { "of DDP's step, ZeRO-1", under(4), 1.05, "<=" },
      { "of DDP's step, ZeRO-2", function(f) return f[2].step_us / f[4].step_us end, 1.05, "<=" },
      { "of DDP's step, ZeRO-3", function(f) return f[3].step_us / f[4].step_us end, 1.15, "<=" },
      { "x PyTorch FSDP2, ZeRO-3", function(f) return f[5] and f[5].step_us / f[3].step_us end },
      -- half of the optimizer's states: 43 MB
      { "MB of peak memory below DDP's, ZeRO-1", function(f) return f[4].peak_mb - f[1].peak_mb end, 40, ">=" },
      { "MB of peak memory below DDP's, ZeRO-2", function(f) return f[4].peak_mb - f[2].peak_mb end, 40, ">=" },
      { "MB of peak memory below DDP's, ZeRO-3", function(f) return f[4].peak_mb - f[3].peak_mb end, 40, ">=" } } },
  { name = "tensor", title = "gpt small step, f32, tensor and sequence parallel, 2 ranks x 1 thread",
    { "tensor + sequence", ours("gpt", 2, 1, "--parallel tensor=2,sequence=true") },
    { "tensor", ours("gpt", 2, 1, "--parallel tensor=2") },
    { "DDP", ours("gpt", 2, 1) },
    claims = { { "of DDP's step", under(3), 1.15, "<=" },
      { "of DDP's step, without sequence", function(f) return f[2].step_us / f[3].step_us end } } },
  { name = "pipeline", title = "gpt small step, f32, pipeline of 2 ranks x 1 thread, 8 microbatches",
    { "ZB-H1", ours("gpt", 2, 1, "--micro 1 --parallel pipeline=2,schedule=zb_h1") },
    { "1F1B", ours("gpt", 2, 1, "--micro 1 --parallel pipeline=2,schedule=1f1b") }, { "DDP", ours("gpt", 2, 1) },
    claims = { { "of what bubble and stage times allow, ZB-H1", function(f) return f[1].step_us / f[1].ideal_us end, 1.07, "<=" },
      { "of what bubble and stage times allow, 1F1B", function(f) return f[2].step_us / f[2].ideal_us end, 1.07, "<=" },
      { "of 1F1B's step, ZB-H1", under(2), 1, "<=" }, { "of DDP's step, ZB-H1", under(3) } } },
  { name = "start", title = "start to the end of the first step, linear.lua, alone",
    { "dtrain", wall(build .. "/dtrain examples/linear.lua --steps 1 --quiet") },
    { "import torch", python and wall(python .. " -c 'import torch'") or nil },
    claims = { { "us", microseconds, 100000, "<=" }, { "x import torch", over(2) } } },
  { name = "start", title = "the same, 2 ranks",
    { "dtrain", wall(ranks2(build .. "/dtrain examples/linear.lua --steps 1 --quiet")) },
    { "2 empty MPI programs", wall(ranks2(build .. "/bench/mpi_init")) },
    claims = { { "us more than empty MPI programs", function(f) return f[1].step_us - f[2].step_us end, 150000, "<=" } } },
}

-- ---- the table ----
local kept, missed = 0, 0
local function judge(text, value, bar, sense)
  if not value then return end
  local number = (math.abs(value) >= 100 and "%.0f" or "%.2f"):format(value)
  if not bar then
    print(("    %10s %s"):format(number, text))
    return
  end
  local ok
  if sense == "<=" then ok = value <= bar else ok = value >= bar end
  if ok then kept = kept + 1 else missed = missed + 1 end
  print(("    %10s %-40s bar %s %-8g %s"):format(number, text, sense, bar, ok and "reached" or "NOT reached"))
end
local function pretty(us)
  if us >= 1e6 then return ("%.3f s"):format(us / 1e6) end
  if us >= 1e3 then return ("%.2f ms"):format(us / 1e3) end
  return ("%.2f us"):format(us)
end
local function wanted(name)
  for _, w in ipairs(words) do if w == name then return true end end
  return #words == 0
end

print(("%d cores, %d rounds; PyTorch: %s"):format(cores, rounds, python or "not measured (DT_PEER_PYTHON=python with torch)"))
io.write((capture(build .. "/dtrain --version")))
for _, row in ipairs(rows) do
  if wanted(row.name) then
    print("\n" .. row.title)
    local runs, figures, earlier = {}, {}, {}
    local most = 0
    for i = 1, 5 do if row[i] and row[i][2] then most = i end end
    for _ = 1, rounds do
      for i = 1, most do
        if row[i] and row[i][2] then
          runs[i] = runs[i] or {}
          table.insert(runs[i], row[i][2]())
        end
        if row[i] and row[i][3] then
          earlier[i] = earlier[i] or {}
          table.insert(earlier[i], row[i][3]().step_us)
        end
      end
    end
    for i = 1, most do
      if runs[i] then
        figures[i] = {}
        for _, key in ipairs { "step_us", "peak_mb", "plan_mb", "gflops", "ideal_us" } do
          if runs[i][1][key] then
            local list = {}
            for k, r in ipairs(runs[i]) do list[k] = r[key] end
            figures[i][key] = median(list)
          end
        end
        local f = figures[i]
        local text = ("  %-34s %12s"):format(row[i][1], pretty(f.step_us))
        if f.gflops then text = text .. (" %8.1f GFLOP/s a process"):format(f.gflops) end
        if f.peak_mb then text = text .. (" %8.0f MB peak"):format(f.peak_mb) end
        if f.plan_mb then text = text .. (", %.0f MB planned"):format(f.plan_mb) end
        print(text)
        if earlier[i] then judge("of the earlier build's step", f.step_us / median(earlier[i]), 1.03, "<=") end
      end
    end
    for _, c in ipairs(row.claims) do judge(c[1], c[2](figures), c[3], c[4]) end
  end
end

if wanted "plan" then
  print "\nplanning without ranks"
  local function timed(title, command, bar)
    local list = {}
    for k = 1, rounds do
      local begin = seconds()
      local text, ok = capture(command .. " > /dev/null")
      if not ok then error(text, 0) end
      list[k] = seconds() - begin
    end
    print(("  %-60s %s"):format(title, pretty(median(list) * 1e6)))
    judge("s", median(list), bar, "<=")
    return median(list)
  end
  local function deep(words_) return ("%s/dtrain plan tests/bench/deep.lua %s"):format(build, words_) end
  timed("a GPT of 175 billion on 4096 ranks", build .. "/dtrain plan examples/strategies/gpt_175b.lua --ranks 4096", 2)
  local once, twice = timed("a GPT of 128 layers", deep "--layers 128"), timed("a GPT of 256 layers", deep "--layers 256")
  judge("times as long for 256 layers as for 128", twice / once, 2.2, "<=")
  timed("a GPT of 1000 layers on 8 ranks", deep "--layers 1000 --ranks 8", 5)
  local compiled = result(capture(build .. "/dtrain plan tests/bench/compile.lua")).step_us
  print(("  %-60s %s"):format("GPT-2 124M compiled once more, the slowest of six strategies", pretty(compiled)))
  judge("ms", compiled / 1e3, 30, "<=")
  timed("m = m * m + m, 64 times, in two stages", deep "--squares 64 --pipeline 2 --ranks 2", 1)
end

if wanted "allreduce" then
  print "\nall-reduce f32, 2 ranks on this host (the program takes turns itself)"
  local text = capture(ranks2(build .. "/bench/allreduce"))
  local bars = { [65536] = 3, [4194304] = 7, [67108864] = 7 }
  for line in text:gmatch "[^\n]+" do
    local bytes, mine, mpi, least = line:match "^%s*(%d+)%s+([%d.]+)%s+([%d.]+)%s+([%d.]+)"
    bytes = tonumber(bytes)
    if bars[bytes] then
      print(("  %d bytes: dtrain %s, Open MPI %s, memory floor %s"):format(bytes, pretty(tonumber(mine)), pretty(tonumber(mpi)),
        pretty(tonumber(least))))
      judge("x Open MPI", mpi / mine, bars[bytes], ">=")
      if bytes > 65536 then judge("of the memory floor", least / mine, 0.8, ">=") end
    end
  end
  if not text:find "%d+%s+[%d.]+%s+[%d.]+%s+[%d.]+" then error(text, 0) end
end
print(("\n%d bars reached, %d not"):format(kept, missed))
