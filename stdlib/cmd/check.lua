-- dtrain check script.lua --ranks n [--all | --reference other.lua] [--steps k]: a few steps with the script's strategy on n ranks and
-- in one process (or of another script on n ranks) from the same seed; the loss of each step, and every parameter's gradient (as
-- the optimizer sees it, before clipping) and value after it, must agree. Exit code 0: they do; 1: they differ; 2: a side did not run.
--
-- Each side is a dtrain of its own, `dtrain check --into file`, whose rank 0 writes all of it into a file.
local BatchNorm2d = require "dtrain.nn.batch_norm"
local cli = require "dtrain.cli"
local compare = require "dtrain.compare"
local core = require "dtrain.core"
local cover = require "dtrain.cover"
local engines = require "dtrain.engine"
local modules = require "dtrain.nn.module"
local planned = require "dtrain.cmd.planned"
local strategies = require "dtrain.strategy"
local trace = require "dtrain.trace"
local util = require "dtrain.util"

local function fail(fmt, ...) error("dtrain: " .. fmt:format(...), 0) end
local function quote(s) return "'" .. s:gsub("'", "'\\''") .. "'" end
local function output_of(command)
  local pipe <close> = assert(io.popen(command))
  return (pipe:read("a"):gsub("%s+$", ""))
end

-- ---- one side ----
local function side(job, steps, path)
  job.checkpoint, job.out, job.eval.data = nil, nil, nil
  cli.given.steps, cli.given.out, cli.given.resume = steps, nil, nil
  -- f16 gradients overflow at the usual start of the loss scale where they travel in 16 bits, and not where one process adds them in
  -- f32: both sides start where neither skips a step
  local scaling = job.scaling
  if scaling and not scaling.fixed_scale then scaling.loss_scale = math.min(scaling.loss_scale or 256, 256) end
  local numbers = compare.record(engines.new(job), steps)
  if core.rank() == 0 then core.save(path, numbers) end
end

-- ---- starting the sides ----
-- The words that make a side of this command; parallel: what --parallel says, nil: the script's own; alone: without what was said of
-- `parallel` before the script, which is for the other side.
local function command(words, ranks, path, steps, parallel, alone)
  local pid = io.open("/proc/self/stat"):read("n")
  local list = { output_of(("readlink /proc/%d/exe"):format(pid)), "check", "--into", path, "--steps", tostring(steps) }
  for name, v in util.sorted(cli.before) do
    if not (alone and name == "parallel") then list[#list + 1] = ("--%s=%s"):format(name, v) end
  end
  for _, w in ipairs(words) do list[#list + 1] = w end
  if parallel then list[#list + 1] = "--parallel=" .. parallel end
  local line = table.concat(util.map(list, quote), " ")
  if ranks == 1 then return "exec env DT_COMM=self " .. line end
  if cli.given.launch then return ("%s -n %d %s"):format(cli.given.launch, ranks, line) end
  local start = ("mpirun --mca btl_vader_single_copy_mechanism none -n %d "):format(ranks)
  if ranks > (math.tointeger(tonumber(output_of "nproc 2> /dev/null")) or 1) then
    start = start:gsub("^mpirun", "mpirun --oversubscribe --mca mpi_yield_when_idle 1")
  end
  local root = output_of "id -u" == "0" and "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 " or ""
  return "exec env " .. root .. start .. line
end

-- Runs it; returns nothing, or what it said when it failed. file: what it must have written.
local function run(line, log, file)
  local done, _, code = core.shell(line .. " > " .. quote(log) .. " 2>&1 < /dev/null")
  if done and core.exists(file) then return end
  if done then
    return ("its rank 0 did not write %s here; start rank 0 on this host (--launch), or set TMPDIR to a folder that all hosts "
      .. "see"):format(file)
  end
  local said <close> = io.open(log)
  local text = said and said:read("a") or ""
  return ("%s(exit code %d)"):format(text:gsub("%-%-%-%-%-.*$", ""), code)
end

-- ---- strategies to try ----
local function divisors(n)
  local out = {}
  for d = 1, n do if n % d == 0 then out[#out + 1] = d end end
  return out
end

-- The library's keys of `parallel` and what is tried of each; those that no strategy reads are left out.
local function variants(job, ranks)
  local rows = { { "zero", { 0, 1, 2, 3 } }, { "tensor", divisors(ranks) }, { "sequence", { false, true } },
    { "pipeline", divisors(ranks) }, { "schedule", { "gpipe", "1f1b", "interleaved", "zb_h1" } },
    { "recompute", { "none", "full" } } }
  local known, out = {}, {}
  for _, s in ipairs(job.parallel.list) do
    for _, row in ipairs(s.options or {}) do known[row[1]] = true end
    for _, row in ipairs(s.variants or {}) do
      known[row[1]] = true
      rows[#rows + 1] = row
    end
  end
  for _, row in ipairs(rows) do if known[row[1]] then out[#out + 1] = row end end
  local list = cover(out, function(r)
    return ranks % ((r.tensor or 1) * (r.pipeline or 1)) == 0 and not (r.sequence and r.tensor == 1)
      and not (r.pipeline == 1 and r.schedule and r.schedule ~= "1f1b")
  end)
  return util.map(list, function(r)
    local text = { "none" }
    for _, row in ipairs(out) do
      local v, plain = r[row[1]], row[2][1]
      if v ~= plain and not (row[1] == "schedule" and r.pipeline == 1) then text[#text + 1] = row[1] .. "=" .. tostring(v) end
    end
    return table.concat(text, ",")
  end)
end

-- Plans it for the first and the last rank; returns the error of a strategy that is refused, or nil and the warnings
-- (planned.warnings).
local function refused(job, parallel, ranks)
  local warnings
  local ok, message = pcall(function()
    if parallel then
      cli.given.parallel = parallel
      job.parallel = util.at(job.where, strategies.new, cli.parallel(job.declared))
    end
    for _, rank in ipairs(ranks > 1 and { 0, ranks - 1 } or { 0 }) do
      warnings = planned.warnings(planned.plans(job, ranks, rank).main)
    end
  end)
  if not ok then return tostring(message) end
  return nil, warnings
end

local function limits(precision)
  return ("%g, after the first update %g"):format(compare.allowed[precision], compare.later[precision])
end

-- Whether a batch norm of the job sees other samples together on `ranks` ranks than in one process; says so, or nil.
local function norm_hint(job, ranks)
  local where = job:where_is(0, ranks)
  local mine, one = job:rows(where.replicas), job:rows(1)
  local why, seen = nil, {}
  local function look(module)
    if seen[module] then return end
    seen[module] = true
    local rows = module.sync and mine * where.copies or mine
    if getmetatable(module).class == BatchNorm2d and rows ~= one then
      why = ("BatchNorm2d normalises %d samples together here and %d in one process, so its results differ: sync = true takes the "
        .. "microbatches of all replicas together, and batch.micro says how large they are"):format(rows, one)
    end
    modules.base.each_child(module, function(_, child) if modules.is(child) then look(child) end end)
  end
  for _, m in ipairs(trace.modules(job)) do look(m[2]) end
  return why
end

local function check_all(job, words, ranks, steps, dir)
  local list, bad, ran, seen = variants(job, ranks), 0, 0, {}
  print(("%d steps on %d ranks against one process; allowed of a tensor's largest element: %s"):format(steps, ranks,
    limits(job.precision)))
  print(("%-56s %-9s %s"):format("strategy", "result", "worst loss, gradient, later ones, value"))
  local want = core.load(dir .. "/one.safetensors")
  for _, parallel in ipairs(list) do
    local title = parallel:gsub("^none,?", "")
    local message, warnings = refused(job, parallel, ranks)
    local result, detail = "refused", message
    if not seen[parallel] and not detail then
      local said = run(command(words, ranks, dir .. "/ranks.safetensors", steps, parallel), dir .. "/log", dir .. "/ranks.safetensors")
      if said then
        result, detail = "FAILED", said
      else
        local text, worst = compare.runs(core.load(dir .. "/ranks.safetensors"), want, compare.names(job), job.precision)
        result = text and "DIFFERS" or "equal"
        detail = ("%.1e %.1e %.1e %.1e%s"):format(worst.loss, worst.gradient, worst.later, worst.value,
          text and "  " .. text or "")
        ran = ran + 1
      end
      os.remove(dir .. "/ranks.safetensors")
    end
    if not seen[parallel] then
      print(("%-56s %-9s %s"):format(title == "" and "data" or title, result, detail))
      for _, line in ipairs(warnings or {}) do print("  " .. line) end
      if result == "FAILED" or result == "DIFFERS" then bad = bad + 1 end
    end
    seen[parallel] = true
  end
  print(bad > 0 and ("%d of them not equal"):format(bad) or ran > 0 and ("all %d that ran are equal"):format(ran)
    or "none of them ran, so nothing is proved: every row was refused")
  return bad > 0 and 1 or ran > 0 and 0 or 2
end

return function(words)
  local steps = cli.given.steps or cli.peek("steps", "count") or 3
  local into = cli.given.into
  cli.before = {}
  for _, name in ipairs { "seed", "threads", "parallel" } do cli.before[name] = cli.given[name] end
  local job = planned.job(words)
  steps, into = cli.given.steps or steps, cli.given.into or into
  if into then
    side(job, steps, into)
    return 0
  end
  if os.getenv "OMPI_COMM_WORLD_SIZE" then
    fail("check starts its ranks itself; run it without mpirun: dtrain check %s --ranks %s", words[1],
      os.getenv "OMPI_COMM_WORLD_SIZE")
  end
  local ranks = cli.given.ranks or 2
  if ranks > 1 and not cli.given.launch and output_of "command -v mpirun" == "" then
    fail("check needs Open MPI's mpirun on the PATH to start %d ranks, and there is none; install openmpi-bin, or try --ranks 1",
      ranks)
  end
  local reference = cli.given.reference
  if reference and cli.given.all then fail("check takes --all or --reference, not both: --all compares with one process") end
  local message, warnings
  if not cli.given.all then message, warnings = refused(job, nil, ranks) end
  if message then error(message, 0) end
  local dir = core.scratch()
  if not dir then
    fail("check needs a folder for its files, and none can be made in %s; set TMPDIR to a folder that can be written",
      os.getenv "TMPDIR" and "TMPDIR=" .. os.getenv "TMPDIR" or "/tmp")
  end
  local other = { reference or words[1] } -- with the script's own options; what --parallel says is for the first side
  for i = 2, #words do
    local name, before = cli.name(words[i]), cli.name(words[i - 1])
    local value = before == "parallel" and not words[i - 1]:find "="
    if not reference or name ~= "parallel" and not value then other[#other + 1] = words[i] end
  end
  local against = reference and ("%s on as many"):format(reference) or "one process"
  local said = run("unset DT_FAULT; " .. command(other, reference and ranks or 1, dir .. "/one.safetensors", steps,
    not reference and "none" or nil, reference ~= nil), dir .. "/log", dir .. "/one.safetensors")
  if said then
    io.stderr:write(("dtrain: check: %s did not run:\n"):format(reference or "the one process"), said, "\n")
    return 2
  end
  if cli.given.all then return check_all(job, words, ranks, steps, dir) end
  said = run(command(words, ranks, dir .. "/ranks.safetensors", steps), dir .. "/log", dir .. "/ranks.safetensors")
  if said then
    io.stderr:write(("dtrain: check: the %d ranks did not run:\n"):format(ranks), said, "\n")
    return 2
  end
  local text, worst = compare.runs(core.load(dir .. "/ranks.safetensors"), core.load(dir .. "/one.safetensors"), compare.names(job),
    job.precision, reference and { "here", "in " .. reference })
  local mesh = util.map(strategies.wide(job:where_is(0, ranks).mesh), function(a) return ("%s %d"):format(a.name, a.size) end)
  print(("%d steps of %s on %d rank%s (%s) against %s"):format(steps, words[1], ranks, ranks == 1 and "" or "s",
    table.concat(mesh, ", "), against))
  for _, line in ipairs(warnings) do print(line) end
  if text then
    print("DIFFERS at " .. text)
    local why = norm_hint(job, ranks)
    if why and not reference then print("(" .. why .. ")") end
    return 1
  end
  local parts = { ("losses to %.1e"):format(worst.loss),
    ("gradients of %d parameters to %.1e (in later steps %.1e)"):format(#compare.names(job), worst.gradient, worst.later),
    ("their values to %.1e of the largest element (allowed %s)"):format(worst.value, limits(job.precision)) }
  print("equal: " .. table.concat(parts, ", "))
  return 0
end
