-- dtrain check script.lua --ranks n [--all] [--steps k]: a few steps with the script's strategy on n ranks and in one process from
-- the same seed; the loss of each step, and every parameter's gradient (as the optimizer sees it, before clipping) and value
-- after it, must agree. Exit code 0: they do; 1: they differ; 2: a side did not run.
--
-- Each side is a dtrain of its own, `dtrain check --into file`, whose rank 0 writes all of it into a file.
local cli = require "dtrain.cli"
local core = require "dtrain.core"
local cover = require "dtrain.cover"
local engines = require "dtrain.engine"
local modules = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local planned = require "dtrain.cmd.planned"
local strategies = require "dtrain.strategy"
local trace = require "dtrain.trace"
local util = require "dtrain.util"

-- Relative to the largest element of a tensor. 16-bit activations round at 2^-9 or 2^-12; sums in another order, or in parts on
-- several ranks, round at other places, a few times in a row.
local allowed = { f32 = 2e-5, bf16 = 2e-2, f16 = 2e-2 }

local function fail(fmt, ...) error("dtrain: " .. fmt:format(...), 0) end
local function quote(s) return "'" .. s:gsub("'", "'\\''") .. "'" end
local function output_of(command)
  local pipe <close> = assert(io.popen(command))
  return (pipe:read("a"):gsub("%s+$", ""))
end

-- The model's parameters, in its order.
local function parameters(job)
  local out = {}
  for _, m in ipairs(trace.modules(job)) do
    modules.base.each_parameter(m[2], function(name, p) if p.type == "param" then out[#out + 1] = m[1] .. name end end)
  end
  return out
end

-- ---- one side ----
local function side(job, steps, path)
  job.checkpoint, job.out, job.eval.data = nil, nil, nil
  cli.given.steps, cli.given.out, cli.given.resume = steps, nil, nil
  local engine, out, losses, norms = engines.new(job), {}, {}, {}
  local function keep(step, names, what)
    for _, name in ipairs(names) do
      local t = engine:whole(what .. name)
      if core.rank() == 0 then out[("%d %s%s"):format(step, what, name)] = t end
    end
  end
  local names = parameters(job)
  keep(0, names, "")
  for step = 1, steps do
    local m = engine:step()
    losses[step], norms[step] = m.loss, m.grad_norm
    keep(step, names, "grad:")
    keep(step, names, "")
  end
  out.losses, out.norms = core.tensor(losses, "f64"), core.tensor(norms, "f64")
  if core.rank() == 0 then core.save(path, out) end
end

-- ---- starting the sides ----
-- The words that make a side of this command; parallel: what --parallel says, nil: the script's own.
local function command(words, ranks, path, steps, parallel)
  local pid = io.open("/proc/self/stat"):read("n")
  local list = { output_of(("readlink /proc/%d/exe"):format(pid)), "check", "--into", path, "--steps", tostring(steps) }
  for name, v in util.sorted(cli.before) do list[#list + 1] = ("--%s=%s"):format(name, v) end
  for _, w in ipairs(words) do list[#list + 1] = w end
  if parallel then list[#list + 1] = "--parallel=" .. parallel end
  local line = table.concat(util.map(list, quote), " ")
  if ranks == 1 then return line end
  local start = ("mpirun --mca btl_vader_single_copy_mechanism none -n %d "):format(ranks)
  if ranks > (math.tointeger(tonumber(output_of "nproc 2> /dev/null")) or 1) then
    start = start:gsub("^mpirun", "mpirun --oversubscribe --mca mpi_yield_when_idle 1")
  end
  if output_of "id -u" == "0" then start = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 " .. start end
  return start .. line
end

-- Runs it; returns nothing, or what it said when it failed.
local function run(line, log)
  local done, _, code = os.execute(line .. " > " .. quote(log) .. " 2>&1 < /dev/null")
  if done then return end
  local file <close> = io.open(log)
  local text = file and file:read("a") or ""
  return ("%s(exit code %d)"):format(text:gsub("%-%-%-%-%-.*$", ""), code)
end

-- ---- the comparison ----
local function largest(t) return t:numel() == 0 and 0 or ops.max(ops.abs(t)):item() end

local function place_of(t, i)
  local shape, at = t:shape(), {}
  for d = #shape, 1, -1 do
    at[d] = i % shape[d]
    i = i // shape[d]
  end
  return #at > 0 and ("[%s]"):format(table.concat(at, ",")) or ""
end

-- The first difference between two files of numbers, or nil; and the worst ratios of losses, gradients and values.
local function compare(got, want, names, steps, limit)
  local worst = { loss = 0, gradient = 0, value = 0 }
  local noise, start = {}, {} -- by parameter: how far gradients differ relative to themselves; values before the first step
  local function numbers(step, what, key)
    local a, b = got[key]:totable()[step], want[key]:totable()[step]
    local r = a == b and 0 or math.abs(a - b) / math.max(math.abs(b), 1e-30)
    worst.loss = math.max(worst.loss, r == r and r or math.huge)
    if not (r <= limit) then
      return ("step %d: %s is %.9g on the ranks, %.9g in one process: %.2g relative"):format(step, what, a, b, r)
    end
  end
  -- slack: tensor of what is allowed beside the limit, or nil
  local function tensors(step, kind, name, key, slack)
    local a, b = got[key], want[key]
    if not a and not b then return end
    if not a or not b then return ("step %d: the %s of %s is only on one side"):format(step, kind, name) end
    a, b = a:to "f64", b:to "f64"
    local apart, scale = ops.abs(a - b), largest(b)
    local over = slack and ops.maximum(apart - slack, 0) or apart
    local r = largest(over)
    r = r == 0 and 0 or r / math.max(scale, 1e-30)
    worst[kind] = math.max(worst[kind], r == r and r or math.huge)
    if r <= limit then return end
    local i = r == r and ops.argmax(over:reshape { -1 }, 0):item() or 0
    local x, y = a:reshape { -1 }:totable()[i + 1], b:reshape { -1 }:totable()[i + 1]
    return ("step %d: the %s of %s differs, most at %s: %.9g on the ranks, %.9g in one process; %.2g of its largest element")
      :format(step, kind, name, place_of(b, i), x, y, r)
  end
  -- An adaptive optimizer makes steps of full size from the rounding of a gradient that is zero but for it. So a value may differ by
  -- as much as the observed difference of its own gradient, in relation to that gradient, explains.
  local function slack_of(step, name)
    local a, b = got[("%d grad:%s"):format(step, name)], want[("%d grad:%s"):format(step, name)]
    if not a or not b then return end
    a, b = a:to "f64", b:to "f64"
    local now = ops.minimum(ops.abs(a - b) / (ops.abs(b) + 1e-30), 2)
    noise[name] = noise[name] and ops.maximum(noise[name], now) or now
    return noise[name] * (4 * largest(want[("%d %s"):format(step, name)]:to "f64" - start[name]))
  end
  for _, name in ipairs(names) do
    local text = tensors(0, "value", name, "0 " .. name)
    if text then return text, worst end
    start[name] = want["0 " .. name]:to "f64"
  end
  for step = 1, steps do
    local text = numbers(step, "the loss", "losses")
    for _, name in ipairs(names) do
      text = text or tensors(step, "gradient", name, ("%d grad:%s"):format(step, name))
    end
    text = text or numbers(step, "the gradient norm", "norms")
    for _, name in ipairs(names) do
      text = text or tensors(step, "value", name, ("%d %s"):format(step, name), slack_of(step, name))
    end
    if text then return text, worst end
  end
  return nil, worst
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

-- Plans it for the first and the last rank; returns the error of a strategy that is refused.
local function refused(job, parallel, ranks)
  local ok, message = pcall(function()
    if parallel then
      cli.given.parallel = parallel
      job.parallel = util.at(job.where, strategies.new, cli.parallel {})
    end
    for _, rank in ipairs(ranks > 1 and { 0, ranks - 1 } or { 0 }) do planned.plans(job, ranks, rank) end
  end)
  return not ok and tostring(message) or nil
end

local function check_all(job, words, ranks, steps, dir, limit)
  local list, bad, seen = variants(job, ranks), 0, {}
  print(("%d steps on %d ranks against one process, allowed %g of a tensor's largest element"):format(steps, ranks, limit))
  print(("%-56s %-9s %s"):format("strategy", "result", "worst loss, gradient, value"))
  local want = core.load(dir .. "/one.safetensors")
  for _, parallel in ipairs(list) do
    local title = parallel:gsub("^none,?", "")
    local result, detail = "refused", refused(job, parallel, ranks)
    if not seen[parallel] and not detail then
      local said = run(command(words, ranks, dir .. "/ranks.safetensors", steps, parallel), dir .. "/log")
      if said then
        result, detail = "FAILED", said
      else
        local text, worst = compare(core.load(dir .. "/ranks.safetensors"), want, parameters(job), steps, limit)
        result = text and "DIFFERS" or "equal"
        detail = ("%.1e %.1e %.1e%s"):format(worst.loss, worst.gradient, worst.value, text and "  " .. text or "")
      end
      os.remove(dir .. "/ranks.safetensors")
    end
    if not seen[parallel] then
      print(("%-56s %-9s %s"):format(title == "" and "data" or title, result, detail))
      if result == "FAILED" or result == "DIFFERS" then bad = bad + 1 end
    end
    seen[parallel] = true
  end
  print(bad == 0 and "all that ran are equal" or ("%d of them not equal"):format(bad))
  return bad == 0 and 0 or 1
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
  if ranks > 1 and output_of "command -v mpirun" == "" then
    fail("check needs Open MPI's mpirun on the PATH to start %d ranks, and there is none; install openmpi-bin, or try --ranks 1",
      ranks)
  end
  local limit = allowed[job.precision]
  local message = not cli.given.all and refused(job, nil, ranks)
  if message then error(message, 0) end
  local dir = output_of "mktemp -d"
  local _ <close> = setmetatable({}, { __close = function() os.execute("rm -rf " .. quote(dir)) end })
  local said = run("env -u DT_FAULT " .. command(words, 1, dir .. "/one.safetensors", steps, "none"), dir .. "/log")
  if said then
    io.stderr:write("dtrain: check: the one process did not run:\n", said, "\n")
    return 2
  end
  if cli.given.all then return check_all(job, words, ranks, steps, dir, limit) end
  said = run(command(words, ranks, dir .. "/ranks.safetensors", steps), dir .. "/log")
  if said then
    io.stderr:write(("dtrain: check: the %d ranks did not run:\n"):format(ranks), said, "\n")
    return 2
  end
  local names = parameters(job)
  local text, worst = compare(core.load(dir .. "/ranks.safetensors"), core.load(dir .. "/one.safetensors"), names, steps, limit)
  local mesh = util.map(job:where_is(0, ranks).mesh, function(a) return ("%s %d"):format(a.name, a.size) end)
  print(("%d steps of %s on %d rank%s (%s) against one process"):format(steps, words[1], ranks, ranks == 1 and "" or "s",
    table.concat(mesh, ", ")))
  if text then
    print("DIFFERS at " .. text .. (" (allowed %g)"):format(limit))
    return 1
  end
  print(("equal: losses to %.1e, gradients of %d parameters to %.1e, their values to %.1e of the largest element (allowed %g)")
    :format(worst.loss, #names, worst.gradient, worst.value, limit))
  return 0
end
