"""A sweep whose values Optuna proposes: ``pip install optuna``, then ``python examples/optuna_sweep.py run.yaml 20``.

The same command continues after a kill: the study is a file, and a trial that was at work resumes from its checkpoint.
"""

import sys

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import manyhands

run, num_trials = sys.argv[1], int(sys.argv[2])
storage = JournalStorage(JournalFileBackend("optuna.journal"))
study = optuna.create_study(study_name="optuna", storage=storage, load_if_exists=True)
for trial in study.get_trials(states=[TrialState.RUNNING]):  # of a process that was killed
    study.tell(trial.number, state=TrialState.FAIL)
    study.enqueue_trial(trial.params)
while len(study.get_trials(states=[TrialState.COMPLETE])) < num_trials:
    trial = study.ask()
    keys = {
        "optimizer.learning_rate": float(f"{trial.suggest_float('learning_rate', 1e-5, 1e-3, log=True):.3g}"),
        "method.rank": trial.suggest_categorical("rank", [8, 16, 32]),
    }
    name = "-".join(str(value) for value in keys.values())  # the same values: the same run, which resumes
    done = manyhands.train(run, {**keys, "output.dir": "runs/optuna", "name": name})
    study.tell(trial, done.evaluations[-1]["loss"])
    print(f"best of {len(study.trials)}: {study.best_value:.4f} with {study.best_params}")
