-- dt.engine(job): a job made ready to run: loaders, plans for every size of microbatch, the executor, checkpoints. A
-- training loop, the library's (train.lua) or the user's, calls step, eval and save; all ranks call the same ones in
-- the same order.
local cli = require "dtrain.cli"
local core = require "dtrain.core"
local folder = require "dtrain.folder"
local identity = require "dtrain.identity"
local jobs = require "dtrain.job"
local modules = require "dtrain.nn.module"
local pieces = require "dtrain.pieces"
local records = require "dtrain.record"
local schedule = require "dtrain.optim.schedule"
local scope = require "dtrain.nn.scope"
local shared = require "dtrain.shared"
local strategies = require "dtrain.strategy"
local trace = require "dtrain.trace"
local util = require "dtrain.util"

local Engine = { __name = "engine" }
Engine.__index = Engine

local M = {}
local cut = false -- a run of this process ended before its last step, because it was asked to

--- Whether a run of this process was asked to stop before its last step.
function M.cut_short() return cut end

-- where = job:where_is(rank, ranks): whose part of the data. plan: the first that will be fed; where the rank reads only a part of
-- a microbatch's rows, no more is loaded. nil: for the sizes.
local function loader_of(job, set, start, eval, where, plan)
  local part, parts = 0, 1
  if plan then part, parts = plan:part() end
  return core.loader(set.core, { part = part, parts = parts, global = job.batch.global, micro = job:rows(where.replicas),
    seed = job.run_seed, start = start, shuffle = not eval, eval = eval, rank = where.data, size = where.replicas })
end

local function here(job) return job:where_is(core.rank(), core.size()) end

-- Rows of a full microbatch first, then the other sizes that this rank meets.
local function sizes_of(loader, rows)
  local out = { rows }
  for _, n in ipairs(loader:sizes()) do if n ~= rows then out[#out + 1] = n end end
  return out
end

-- Where the model itself makes the replicas meet in each microbatch, all must have microbatches of one size.
local function check_even(job, where)
  if not job.meets or where.copies == 1 then return end
  local unit = where.copies * job:rows(where.replicas)
  for _, set in ipairs { { "data", job.data.train:count() }, { "eval data", job.eval.data and job.eval.data:count() or 0 } } do
    local last = set[2] % job.batch.global
    if job.batch.global % unit ~= 0 or last % unit ~= 0 then
      util.fail_at(job.where, "the model uses %s over replicas, so all of them must have microbatches of the same size: "
        .. "batch.global = %d and the %d samples of %s must be multiples of %d (%d replicas x microbatches of %d)", job.meets,
        job.batch.global, set[2], set[1], unit, where.copies, unit // where.copies)
    end
  end
end

--- Every plan of the rank at `where` (job:where_is): { main, train = plans (main first), eval = { { rows, plan } ... }, places =
--- of the metrics' numbers, counts = whether the loss counts its labels, steps_per_epoch }. `run` and `plan` both use
--- it, so that the memory that is planned is the memory that is allocated. traced: a table that keeps what was traced, for
--- other ranks' plans, or nil.
function M.plans(job, where, traced)
  traced = traced or {}
  local loader = loader_of(job, job.data.train, 0, false, where)
  local micros = loader:micros()
  local function how(rows, layout)
    return { rows = rows, where = where, threads = core.threads(), layout = layout, micros = micros, traced = traced }
  end
  local p = { train = {}, eval = {}, between = {}, steps_per_epoch = loader:steps_per_epoch() }
  for i, rows in ipairs(sizes_of(loader, job:rows(where.replicas))) do
    local plan, own = trace.train(job, how(rows, p.main))
    if i == 1 then p.main, p.counts = plan, own end
    p.train[i] = plan
  end
  check_even(job, where)
  for _, s in ipairs(job.parallel:with "between") do
    local every = s.between.every(job.parallel.p)
    if every and where.copies > 1 then
      p.between[#p.between + 1] = { every = every, start = s.between.start,
        plan = trace.between(job, s, how(job:rows(where.replicas), p.main)) }
    end
  end
  if job.eval.data then
    for i, rows in ipairs(sizes_of(loader_of(job, job.eval.data, 0, true, where), job:rows(where.replicas))) do
      local plan, places = trace.eval(job, how(rows, p.main))
      p.eval[i], p.places = { rows, plan }, places
    end
  end
  return p
end

-- The sizes of a rank's microbatches, as text.
local function sizes_text(job, where)
  local loader = loader_of(job, job.data.train, 0, false, where)
  local out = { table.concat(sizes_of(loader, 0), " ") .. "," .. table.concat(loader:micros(), " ") }
  if job.eval.data then
    out[2] = table.concat(sizes_of(loader_of(job, job.eval.data, 0, true, where), 0), " ")
  end
  return table.concat(out, ";")
end

--- What makes two ranks' plans need the same memory: the sizes of their microbatches, and their places among the
--- stages; parts of tensors are equally large. sizes: a table that keeps what was found, data rank -> text.
function M.plan_key(job, where, sizes)
  sizes[where.data] = sizes[where.data] or sizes_text(job, where)
  local out = { sizes[where.data] }
  out[2] = strategies.among(where.mesh, where.rank, "stages")
  return table.concat(out, ";")
end

--- An executor with all of them, not yet ready (its memory() is known, nothing is allocated), and rows -> number of the
--- evaluation plans. options: of core.exec.
function M.executor(plans, options)
  local exec = core.exec(plans.main, options)
  for i = 2, #plans.train do exec:add(plans.train[i]) end
  local numbers = {}
  for _, e in ipairs(plans.eval) do numbers[e[1]] = exec:add(e[2]) end
  for _, b in ipairs(plans.between) do b.number = exec:add(b.plan) end
  return exec, numbers
end

local function numel(shape)
  local n = 1
  for _, d in ipairs(shape) do n = n * d end
  return n
end

local function check_size(job, where)
  local n, have = job.data.train:count(), where.replicas
  if n < have then
    util.fail_at(job.where, "%d ranks share %d sample%s; start at most %d rank%s or give more data", have, n,
      n == 1 and "" or "s", n, n == 1 and "" or "s")
  end
end

--- The engine of a job. Options of the command line (--steps, --seed, --resume ...) apply.
function M.new(job)
  if not jobs.is(job) then util.fail("dt.engine wants a job made by dt.job, got %s (%s)", util.show(job),
    util.kind(job)) end
  job.taken = true
  if cli.capture then error(job, 0) end -- plan and explain want the job, not the loop
  local options = cli.options()
  job.run_seed = options.seed or job.seed
  core.ctx { threads = options.threads or 0, seed = job.run_seed }
  job.runs_on = util.at(job.where, core.device, options.device or job.device)
  local where = here(job)
  check_size(job, where)
  local self = setmetatable({ job = job, options = options, step_number = 0, version = 0, skipped = 0, due = 0 }, Engine)
  self.where, self.out = where, options.out or job.out
  self.checkpoint = job.checkpoint or (self.out and { dir = self.out .. "/checkpoints", keep = 3 }) or nil
  self.tokens = job.data.train.tokens
  self.replicas = where.replicas

  local plans = M.plans(job, where)
  self.plan, self.places, self.steps_per_epoch = plans.main, plans.places, plans.steps_per_epoch
  self.eval_plan = plans.eval[1] and plans.eval[1][2]
  self.steps = job:total(self.steps_per_epoch, options)
  self.nominal = job.batch.global
  local targets = job:field("targets")
  if plans.counts and targets then self.nominal = self.nominal * numel(targets.shape) end
  local run = util.copy(job.scaling)
  self.rates = job.optimizer:group_lr()
  run.groups, run.nominal, run.profile = #self.rates, self.nominal, job.profile
  for _, step in ipairs(schedule.tried(self.steps)) do job.schedule:rates(step, self.steps, self.rates) end
  self.defines = identity.defines(job, self.steps)
  if core.size() > 1 then util.at(job.where, core.agree, "runs", identity.agreed(self)) end
  self.exec, self.eval_numbers = M.executor(plans, run)
  self.between = plans.between
  if options.trace then core.trace(options.trace, options.first_traced or 1, options.last_traced or math.maxinteger) end
  self.exec:ready()
  for _, b in ipairs(self.between) do if b.start then b.start(self.exec) end end
  local notes = util.copy(job.notes or {})
  if scope.redrawn then
    notes[#notes + 1] = ("%s was read before the job and begins with another value: values are drawn by the run's seed and the name "
      .. "in the whole model; read it once the engine is made"):format(scope.redrawn)
    scope.redrawn = nil
  end
  notes[#notes + 1] = job:without_samples(where)
  for _, m in ipairs(trace.modules(job)) do
    for _, t in ipairs(modules.constants(m[2])) do
      notes[#notes + 1] = ("%s: %s%s is a tensor, and so a constant: it is not trained, saved or moved; nn.parameter trains it, "
        .. "nn.buffer keeps it"):format(t.where, m[1], t.name)
    end
  end
  for _, note in ipairs(not options.quiet and core.rank() == 0 and notes or {}) do print("note: " .. note) end

  shared.join(self)
  self.start = 0
  folder.open(self)
  self:resume(options.resume)
  self.record = records.new(self)
  self.loader = loader_of(job, job.data.train, self.start, false, where, self.plan)
  return self
end

-- The newest checkpoint in a folder that engine:save, a job's checkpoint = { dir = } or --out was given.
local function newest(place)
  for _, dir in ipairs { place, place .. "/checkpoints" } do
    local saved = core.exists(dir) == "directory" and core.checkpoint { dir = dir }
    if saved then return saved end
  end
end

--- Goes on from a checkpoint: "auto" (the newest of the job's folder, if any), a checkpoint's folder, or one that holds
--- checkpoints (its newest). Every tensor must be there. Returns the number of steps done; the next step is the one after them.
function Engine:resume(what, ...)
  if select("#", ...) > 0 then
    util.fail("engine:resume takes a folder and nothing else, for all of a checkpoint counts; model:load(dt.load(file)) takes "
      .. "values alone")
  end
  if self.pieces then util.fail("engine:resume between the microbatches of a step; call it after the last one's engine:step()") end
  if what == nil then return self.step_number end
  util.check("engine:resume", what, "string")
  local saved
  if what == "auto" then
    if not self.checkpoint then
      util.fail_at(self.job.where, "--resume auto: no checkpoint folder is named; add checkpoint = { dir = ... } or --out")
    end
    saved = core.checkpoint { dir = self.checkpoint.dir }
    if not saved then return self.step_number end
  else
    saved = not core.exists(what .. "/manifest.json") and newest(what) or core.checkpoint { path = what }
  end
  local meta = saved:meta()
  local notes, other_precision = identity.compare(self, meta, self.options.resume_with)
  for _, note in ipairs(not self.options.quiet and core.rank() == 0 and notes or {}) do print("note: " .. note) end
  self.exec:load(saved, not other_precision)
  saved:close()
  self.settled, self.due = nil, 0
  self.resumed, self.start, self.step_number = true, meta.step, meta.step
  if self.loader then
    self.loader = loader_of(self.job, self.job.data.train, meta.step, false, self.where, self.plan)
    self.record:back_to(meta.step)
  end
  shared.changed(self, true)
  return meta.step
end

-- mpirun ends its ranks soon after a SIGTERM: where the rest of a step and a save take longer than that, an orderly stop comes too
-- late. Told once, after the second step, whose time is that of the others, or after a save.
local function warn_of_launcher(self)
  if self.warned or not self.step_seconds or not self.checkpoint or self.options.quiet or core.rank() ~= 0 then return end
  if not os.getenv "OMPI_COMM_WORLD_SIZE" or core.size() == 1 then return end
  local patience = tonumber(os.getenv "OMPI_MCA_odls_base_sigkill_timeout") or 1
  local step, save = self.step_seconds, self.save_seconds
  local needs = step + (save or 0)
  if needs + 0.2 < patience then return end
  self.warned = true
  print(("note: a step takes %.2g s%s, and mpirun ends its ranks %.2g s after a SIGTERM, before they have saved; start it with "
    .. "mpirun --mca odls_base_sigkill_timeout %d"):format(step, save and (" and a checkpoint %.2g s"):format(save) or "",
    patience + 0.2, math.ceil(2 * needs + 10)))
end

--- Compares a digest of each parameter, optimizer state and buffer among its replicas; an error on all ranks names the first that
--- differs.
function M.compare(engine)
  if core.size() > 1 then util.at(engine.job.where, engine.exec.alike, engine.exec) end
end

-- What happens after some steps only, n of them done; finds the next step after which something does.
local function attend(self, n, m)
  self.due = math.maxinteger
  local function is_due(every)
    self.due = math.min(self.due, n + every - n % every)
    return n % every == 0
  end
  for _, b in ipairs(self.between) do if is_due(b.every) then self.exec:call(b.number, {}) end end
  local compare, report = self.job.compare_every, self.job.report_every
  if compare > 0 and is_due(compare) then M.compare(self) end
  if n <= self.start + 2 then
    self.due = n + 1
    self.step_seconds = n == self.start + 2 and m.seconds or nil
    warn_of_launcher(self)
  end
  if report and is_due(report) and not self.driven and core.rank() == 0 and not self.options.quiet then
    print(("step=%d, skipped=%d, lr=%g, loss=%.6g, scale=%g, %.4g ms"):format(n, self.skipped, m.lr, m.loss, m.loss_scale,
      m.seconds * 1e3))
  end
end

-- After a step, whole or in pieces. Small models take hundreds of steps a millisecond: what few steps need is in attend.
local function stepped(self, m)
  local n = self.step_number + 1
  self.info, self.step_number = m, n
  shared.changed(self)
  if self.tokens then m.tokens_per_second = m.count / m.seconds else m.samples_per_second = m.samples / m.seconds end
  self.record:step(m)
  if m.skipped then self.skipped = self.skipped + 1 end
  if n >= self.due then attend(self, n, m) end
  return m
end

--- Whether the run is at its end, or asked to stop before it.
function Engine:over()
  if self.step_number >= self.steps then
    core.stop_requested() -- which has nothing left to ask for
    return true
  end
  local stop = self:stop_requested()
  cut = cut or stop
  return stop
end

--- Iterates over (step, batch) up to the job's number of steps; the loop calls engine:step(batch) once for each. batch:
--- { step = from 1, epoch = from 0, index = of the batch in its epoch, from 0 }.
function Engine:batches()
  return function()
    if self:over() then return nil end
    return self.step_number + 1, pieces.batch(self)
  end
end

--- Asks the schedule for the learning rates of the step at hand, as long as they change.
function Engine:schedule()
  local rule, at = self.job.schedule, self.exec:updates()
  self.exec:rate(table.unpack(rule:rates(at, self.steps, self.rates)))
  self.settled = rule.settles and at >= rule.settles
end

--- Trains one step on the next batch; returns a table (the same one each time): step, epoch, samples, loss,
--- grad_norm, count, lr, loss_scale, skipped, seconds, and tokens_per_second or samples_per_second.
function Engine:step(batch)
  if scope.no_sync then
    util.fail("engine:step inside dt.no_sync: a step is a whole update, and reduces gradients once, after its last microbatch; "
      .. "batch = { micro = n } accumulates, parallel = { sync = { every = n } } takes steps without communication")
  end
  if self.pieces then return pieces.finish(self, stepped) end
  if batch and batch.step ~= self.step_number + 1 then
    util.fail("engine:step: this batch belongs to step %d, the next step is %d; take one step for each batch",
      batch.step,
      self.step_number + 1)
  end
  if #self.partners > 0 then shared.take(self, "engine:step") end
  if not self.settled then self:schedule() end
  return stepped(self, self.exec:step(self.loader, self.info))
end

--- Whether a rank was asked to stop (Ctrl-C, SIGTERM): the same answer on all ranks. Ranks talk about it every
--- tenth of a second or 500 steps, outside of the plan, because a loop of the script's may ask at any time.
function Engine:stop_requested()
  if core.size() == 1 then return core.stop_requested() end
  if self.stopping then return true end
  local s = self.stop_check
  if not s then
    s = { at = self.step_number + 1, every = 1, time = core.now() }
    self.stop_check = s
  end
  if self.step_number < s.at then return false end
  local now = core.now()
  local flag = core.tensor({ core.stop_requested() and 1.0 or 0.0, now - s.time }, "f64")
  local answer = core.all_reduce(flag, "max"):totable()
  local pace = answer[2] / s.every
  s.every = math.max(1, math.min(2 * s.every, 500, math.floor(0.1 / math.max(pace, 1e-7))))
  s.at, s.time = self.step_number + s.every, now
  self.stopping = answer[1] > 0
  return self.stopping
end

--- Evaluates the job's metrics on the whole evaluation set, each sample once; returns metric name -> number, the same
--- on all ranks.
function Engine:eval()
  if not self.job.eval.data then
    util.fail("engine:eval: the job has no evaluation data; give data a split or eval = { data = ... }")
  end
  if self.pieces and self.pieces.wants == "backward" then
    util.fail("engine:eval between forward and backward would overwrite what backward needs; call it after engine:step()")
  end
  shared.take(self, "engine:eval")
  local set = self.job.eval.data
  local sums = self.exec:eval(self.eval_numbers, loader_of(self.job, set, 0, true, here(self.job), self.eval_plan))
  local out = {}
  for i, metric in ipairs(self.job.eval.metrics) do
    local place = self.places[i]
    local count = place.count and sums[place.count] or place.per_sample * set:count()
    out[metric.name] = metric.finish(sums[place.sum] / count)
  end
  self.record:eval(out)
  return out
end

--- Writes a checkpoint below `dir` (default: the job's), each rank what it owns. All ranks call it.
function Engine:save(dir)
  local c = self.checkpoint
  dir = dir or (c and c.dir)
  if not dir then util.fail("engine:save needs a folder, or a job with checkpoint = { dir = ... }") end
  shared.take(self, "engine:save")
  if not c or dir ~= c.dir then folder.other(self, dir) end
  M.compare(self)
  self.record:flush()
  local begun = core.now()
  self.exec:save { dir = dir, keep = c and c.keep or 0, meta = { step = self.step_number }, run = self.run, defines = self.defines }
  folder.settle(self, dir)
  self.saved, self.save_seconds = self.step_number, core.now() - begun
  warn_of_launcher(self)
end

Engine.fetch, Engine.store = shared.fetch, shared.store

--- The whole tensor of a parameter on rank 0; "grad:name": its gradient in the last step before clipping, nil when it gets none.
--- All ranks call it, in the same order.
function Engine:whole(name)
  shared.take(self, "engine:whole")
  return self.exec:get(name)
end

pieces.install(Engine)

--- Name -> concrete tensor of parameters and buffers.
function Engine:state() return modules.base.state(self.job.model) end

return M
