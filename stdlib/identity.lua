-- What makes a run the run that it is, as texts: a checkpoint keeps them and a resume compares them; all ranks compare these and
-- whatever else decides a run before the first step.
local cli = require "dtrain.cli"
local core = require "dtrain.core"
local sources = require "dtrain.sources"
local util = require "dtrain.util"

local M = {}

-- Canonical text of a plain value: equal values give equal texts on any rank.
local function text(v)
  if type(v) == "number" then return math.type(v) == "integer" and ("%d"):format(v) or ("%.9g"):format(v) end
  if type(v) == "string" then return v end
  if type(v) == "function" then return sources.of(v) end
  local meta = getmetatable(v)
  if type(meta) == "table" and meta.__name then return meta.__name end
  if type(v) == "boolean" or v == nil then return tostring(v) end
  if type(v) ~= "table" then return type(v) end
  local parts = {}
  for key, x in util.sorted(v) do parts[#parts + 1] = ("%s = %s"):format(text(key), text(x)) end
  return "{ " .. table.concat(parts, ", ") .. " }"
end

local LOOKS = 64 -- samples of a data set whose values are compared

-- A data set by its form, and by the values of samples all over it. Those of a script's own function are not asked for, as they
-- may cost, or differ each time: its text stands for them.
local function data_text(set)
  local out, n = tostring(set) .. (set.about and ", " .. set.about or ""), set:count()
  if set.kind == "from" or n == 0 then return out end
  local hashes, last = {}
  for i = 0, LOOKS - 1 do
    local at = i * (n - 1) // (LOOKS - 1)
    for _, t in util.sorted(at ~= last and set.core:get(at) or {}) do hashes[#hashes + 1] = core.hash(t) end
    last = at
  end
  return ("%s, contents %s"):format(out, core.hash(table.concat(hashes)))
end

local function optimizer_text(o)
  local groups = util.map(o.groups, function(g)
    return text { match = g.said, lr = g.lr, h = util.copy(g.h) }
  end)
  return ("%s %s"):format(o.def.name, text { lr = o.lr, no_decay = o.no_decay, h = util.copy(o.h), groups = groups })
end

-- The schedule by its values at some steps. A function of the script's own may refuse steps beyond its end.
local function schedule_text(job, steps)
  local out = { job.schedule.name .. ":" }
  for _, step in ipairs { 0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000, 300000, 1000000 } do
    if step < steps or job.schedule.name ~= "function" then
      local ok, lr = pcall(job.schedule.rate, job.schedule, step, steps, job.optimizer.lr)
      if ok then out[#out + 1] = ("%.6g"):format(lr) end
    end
  end
  return table.concat(out, " ")
end

--- What defines a run: { name = text }. `name`s are what --resume-with takes; an option of the script's own is
--- "option " and its name, and may differ.
function M.defines(job, steps)
  local out = {
    seed = text(job.run_seed), batch = text(job.batch.global), data = data_text(job.data.train),
    optimizer = optimizer_text(job.optimizer), schedule = schedule_text(job, steps),
    precision = job.precision .. (job.precision == "f16" and " " .. text(job.scaling) or ""), clip = text(job.clip),
    script = sources.text(), dtrain = core.version().version,
  }
  for name, v in util.sorted(cli.chosen) do out["option " .. name] = text(v) end
  return out
end

--- All that decides a run, one "name = text" a line, for all ranks to compare.
function M.agreed(engine)
  local job, out, info = engine.job, {}, core.version()
  local more = { ranks = core.size(), steps = engine.steps, ["instruction set"] = info.isa,
    parallel = util.copy(job.parallel.p), micro = job.batch.micro or "full", rates = engine.rates,
    checkpoint = engine.checkpoint or "none", out = engine.out or "none", ["compare"] = job.compare_every,
    eval = { every = job.eval.every or "end", data = job.eval.data and data_text(job.eval.data) or "none",
      metrics = util.map(job.eval.metrics, function(m) return m.name end) },
    resume = engine.options.resume or "never", overwrite = engine.options.overwrite or false }
  for name, v in util.sorted(engine.defines) do more[name] = v end
  for name, v in util.sorted(more) do out[#out + 1] = ("%s = %s"):format(name, text(v):gsub("[\r\n]+", " ")) end
  return table.concat(out, "\n") .. "\n"
end

--- Compares a checkpoint's run with this one. given: of --resume-with, names that may differ, "all", or nil. An error names the first
--- difference with both sides; returns notes about the differences that were asked for.
function M.compare(engine, meta, given)
  local allowed, notes, names = {}, {}, util.filter(util.keys(engine.defines), function(name) return not name:find "^option " end)
  for name in (given or ""):gmatch "[^,%s]+" do
    if name ~= "all" and not util.contains(names, name) then
      error(("dtrain: --resume-with %s is unknown; %s"):format(name, util.suggest(name, names)), 0)
    end
    allowed[name] = true
  end
  local before = meta.defines
  if not next(before) then before = { seed = text(meta.seed) } end -- written before checkpoints told more
  for name, is in util.sorted(engine.defines) do
    local was = before[name]
    if was and was ~= is then
      if not (allowed[name] or allowed.all or name:find "^option ") then
        util.fail_at(engine.job.where, "the checkpoint %s was written with %s = %s; this run has %s = %s. Give it as it was, or say "
          .. "that it changes: --resume-with %s", meta.path, name, was, name, is, name)
      end
      notes[#notes + 1] = ("%s changes from %s to %s"):format(name, was, is)
    end
  end
  return notes, before.precision and before.precision:match "^%S+" ~= engine.job.precision
end

return M
